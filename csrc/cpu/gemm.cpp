// gemm.h over ATen's brgemm. The matrix library brings its own instruction-set dispatch, so this
// file holds host code only and is empty in the AVX2 and AVX-512 builds.
#include "gemm.h"

#ifdef CPU_CAPABILITY_DEFAULT
#include <ATen/native/CPUBlas.h>

#include <cstdlib>
#include <string_view>
#include <vector>

namespace tfm_kernels {
namespace {

void zero(int64_t m, int64_t n, float* c, int64_t ldc) {
  for (int64_t i = 0; i < m; ++i)
    for (int64_t j = 0; j < n; ++j) c[i * ldc + j] = 0.0f;
}

bool probe_bf16_tiles() {
#if defined(__x86_64__)
  if (!(__builtin_cpu_supports("avx512bf16") || __builtin_cpu_supports("amx-bf16"))) return false;
  try {  // oneDNN may have been told not to use what the CPU has (ONEDNN_MAX_CPU_ISA)
    const std::vector<at::BFloat16> a(16 * 32, at::BFloat16(1.0f)), b(32 * 16, at::BFloat16(1.0f));
    std::vector<float> c(16 * 16);
    at::native::cpublas::brgemm(16, 16, 32, 32, 16, 16, false, a.data(), b.data(), c.data(), true);
    at::native::cpublas::brgemm_release(true);
    return c[0] == 32.0f && c[255] == 32.0f;
  } catch (const std::exception&) {
    return false;
  }
#else
  return false;
#endif
}

}  // namespace

bool has_bf16_tiles() {
  static const bool answer = probe_bf16_tiles();
  return answer;
}

bool has_amx() {
#if defined(__x86_64__)
  static const bool answer = [] {
    const char* told = std::getenv("ONEDNN_MAX_CPU_ISA");
    const bool may = !told || std::string_view(told).substr(0, 6) != "AVX512" ||
                     std::string_view(told).find("AMX") != std::string_view::npos;
    return may && has_bf16_tiles() && __builtin_cpu_supports("amx-bf16");
  }();
  return answer;
#else
  return false;
#endif
}

void gemm_tile(int64_t m, int64_t n, int64_t k, const float* a, int64_t lda, const float* b,
               int64_t ldb, float* c, int64_t ldc, bool accumulate) {
  if (m == 0 || n == 0) return;
  if (k == 0) return accumulate ? void() : zero(m, n, c, ldc);
  at::native::cpublas::brgemm(m, n, k, lda, ldb, ldc, accumulate, a, b, c, false);
}

void gemm_tile(int64_t m, int64_t n, int64_t k, const uint16_t* a, int64_t lda, const uint16_t* b,
               int64_t ldb, float* c, int64_t ldc, bool accumulate) {
  if (m == 0 || n == 0) return;
  if (k == 0) return accumulate ? void() : zero(m, n, c, ldc);
  at::native::cpublas::brgemm(m, n, k, lda, ldb, ldc, accumulate,
                              reinterpret_cast<const at::BFloat16*>(a),
                              reinterpret_cast<const at::BFloat16*>(b), c, true);
}

void gemm_release() {
  at::native::cpublas::brgemm_release(false);
  if (has_bf16_tiles()) at::native::cpublas::brgemm_release(true);
}

}  // namespace tfm_kernels
#endif
