// Matrix tiles for the CPU kernels: a thin layer over oneDNN's brgemm, which libtorch_cpu exports.
//
// Plain C++, no torch header: kernels include it, gemm.cpp implements it once for all instruction
// sets.
#pragma once
#include <algorithm>
#include <cstdint>

namespace tfm_kernels {

// A panel: this many columns of a right operand side by side, which a tile reads without a miss in
// the TLB. brgemm runs 64 wide at 130 to 145 GFLOP/s where 128 and more reach 90 to 110 (Cascade
// Lake).
constexpr int64_t kPanel = 64;

inline int64_t ceil_div(int64_t n, int64_t step) { return (n + step - 1) / step; }
inline int64_t round_up(int64_t n, int64_t step) { return ceil_div(n, step) * step; }

// Rows of a tile, n or a few more: few sizes, because the matrix library compiles code for each.
inline int64_t padded_rows(int64_t n, int64_t step, int64_t step_beyond_panel) {
  return round_up(n, n <= kPanel ? step : step_beyond_panel);
}

// C (m, n) = A (m, k) B (k, n), or C += A B. All row-major with leading dimensions in elements;
// never aliased. Dimensions of 0 are allowed: k == 0 gives zeros (or leaves C).
void gemm_tile(int64_t m, int64_t n, int64_t k, const float* a, int64_t lda, const float* b,
               int64_t ldb, float* c, int64_t ldc, bool accumulate);

// The same with bfloat16 operands (bits in uint16_t) and float32 accumulation, at twice the rate
// and more where the CPU has bfloat16 dot products. B is packed in pairs of rows: element (k, n)
// lies at b[(k / 2) * 2 * ldb + 2 * n + k % 2]; k must be even. Only where has_bf16_tiles().
void gemm_tile(int64_t m, int64_t n, int64_t k, const uint16_t* a, int64_t lda, const uint16_t* b,
               int64_t ldb, float* c, int64_t ldc, bool accumulate);

// The same with 8-bit integers and their exact sums, by AMX. B is packed in groups of four rows:
// element (k, n) lies at b[(k / 4) * 4 * ldb + 4 * n + k % 4]; k must be a multiple of 4. Only
// where has_int8_tiles().
void gemm_tile(int64_t m, int64_t n, int64_t k, const int8_t* a, int64_t lda, const int8_t* b,
               int64_t ldb, int32_t* c, int64_t ldc, bool accumulate);

// Whether this CPU multiplies bfloat16 tiles natively (AVX512_BF16, perhaps AMX). Elsewhere kernels
// widen to float32 first, which is three times faster than the emulation.
bool has_bf16_tiles();

// Whether those tiles are AMX's, which take no longer for 16 columns than the weights take to come.
bool has_amx();

// Whether AMX multiplies tiles of 8-bit integers, too.
bool has_int8_tiles();

// Whether this CPU multiplies vectors of 8-bit integers in groups of four (AVX512_VNNI).
bool has_vnni();

// To be called once by every thread that has used gemm_tile, when it is done (gives back AMX's tile
// registers).
void gemm_release();

inline namespace CPU_CAPABILITY {
namespace {

// float64 has no matrix library here: it exists to check gradients.
inline void gemm_tile(int64_t m, int64_t n, int64_t k, const double* a, int64_t lda,
                      const double* b, int64_t ldb, double* c, int64_t ldc, bool accumulate) {
  for (int64_t i = 0; i < m; ++i) {
    double* row = c + i * ldc;
    if (!accumulate) std::fill_n(row, n, 0.0);
    for (int64_t l = 0; l < k; ++l) {
      const double factor = a[i * lda + l];
      for (int64_t j = 0; j < n; ++j) row[j] += factor * b[l * ldb + j];
    }
  }
}
using tfm_kernels::gemm_tile;

}  // namespace
}  // namespace CPU_CAPABILITY
}  // namespace tfm_kernels
