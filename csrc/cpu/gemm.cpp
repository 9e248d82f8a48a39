// gemm.h over ATen's brgemm. The matrix library brings its own instruction-set dispatch, so this
// file holds host code only and is empty in the AVX2 and AVX-512 builds.
#include "gemm.h"

#ifdef CPU_CAPABILITY_DEFAULT
#include <ATen/native/CPUBlas.h>

#include <algorithm>
#include <cstdlib>
#include <string_view>
#include <vector>

#include "isa.h"

namespace tfm_kernels {
namespace {

// What oneDNN may use; whoever hides something from it means us, too.
[[maybe_unused]] std::string_view told_isa() {
  const char* told = std::getenv("ONEDNN_MAX_CPU_ISA");
  return told ? told : "";
}

// The product of no columns.
template <typename C>
void empty_sums(int64_t m, int64_t n, C* c, int64_t ldc, bool accumulate) {
  if (!accumulate)
    for (int64_t i = 0; i < m; ++i) std::fill_n(c + i * ldc, n, C(0));
}

// Whether brgemm multiplies tiles of ones. It throws where oneDNN was told (ONEDNN_MAX_CPU_ISA) not
// to use what the CPU has.
template <typename T, typename C>
bool multiplies_tiles() {
  try {
    const std::vector<T> a(16 * 64, T(-1)), b(64 * 16, T(1));
    std::vector<C> c(16 * 16);
    at::native::cpublas::brgemm(16, 16, 64, 64, 16, 16, false, a.data(), b.data(), c.data(), true);
    at::native::cpublas::brgemm_release(true);
    return c[0] == C(-64) && c[255] == C(-64);
  } catch (const std::exception&) {
    return false;
  }
}

}  // namespace

bool has_bf16_tiles() {
#if defined(__x86_64__)
  static const bool answer =
      __builtin_cpu_supports("avx512bf16") && multiplies_tiles<at::BFloat16, float>();
  return answer;
#else
  return false;
#endif
}

bool has_amx() {
#if defined(__x86_64__)
  static const bool answer = [] {
    const std::string_view told = told_isa();
    const bool may = told.substr(0, 6) != "AVX512" || told.find("AMX") != std::string_view::npos;
    return may && has_bf16_tiles() && __builtin_cpu_supports("amx-bf16");
  }();
  return answer;
#else
  return false;
#endif
}

bool has_vnni() {
#if defined(__x86_64__)
  static const bool answer =
      told_isa() != "AVX512_CORE" && __builtin_cpu_supports("avx512vnni") && isa() == Isa::avx512;
  return answer;
#else
  return false;
#endif
}

bool has_int8_tiles() {
#if defined(__x86_64__)
  static const bool answer =
      has_amx() && __builtin_cpu_supports("amx-int8") && multiplies_tiles<signed char, int32_t>();
  return answer;
#else
  return false;
#endif
}

void gemm_tile(int64_t m, int64_t n, int64_t k, const float* a, int64_t lda, const float* b,
               int64_t ldb, float* c, int64_t ldc, bool accumulate) {
  if (m == 0 || n == 0) return;
  if (k == 0) return empty_sums(m, n, c, ldc, accumulate);
  at::native::cpublas::brgemm(m, n, k, lda, ldb, ldc, accumulate, a, b, c, false);
}

void gemm_tile(int64_t m, int64_t n, int64_t k, const uint16_t* a, int64_t lda, const uint16_t* b,
               int64_t ldb, float* c, int64_t ldc, bool accumulate) {
  if (m == 0 || n == 0) return;
  if (k == 0) return empty_sums(m, n, c, ldc, accumulate);
  at::native::cpublas::brgemm(m, n, k, lda, ldb, ldc, accumulate,
                              reinterpret_cast<const at::BFloat16*>(a),
                              reinterpret_cast<const at::BFloat16*>(b), c, true);
}

void gemm_tile(int64_t m, int64_t n, int64_t k, const int8_t* a, int64_t lda, const int8_t* b,
               int64_t ldb, int32_t* c, int64_t ldc, bool accumulate) {
  if (m == 0 || n == 0) return;
  if (k == 0) return empty_sums(m, n, c, ldc, accumulate);
  at::native::cpublas::brgemm(m, n, k, lda, ldb, ldc, accumulate, a, b, c, true);
}

void gemm_release() {
  at::native::cpublas::brgemm_release(false);
  if (has_bf16_tiles()) at::native::cpublas::brgemm_release(true);
}

}  // namespace tfm_kernels
#endif
