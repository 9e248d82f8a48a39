// Matrix tiles for the CPU kernels: a thin layer over oneDNN's brgemm, which libtorch_cpu exports.
//
// Plain C++, no torch header: kernels include it, gemm.cpp implements it once for all instruction
// sets.
#pragma once
#include <cstdint>

namespace tfm_kernels {

// C (m, n) = A (m, k) B (k, n), or C += A B. All row-major with leading dimensions in elements;
// never aliased. Dimensions of 0 are allowed: k == 0 gives zeros (or leaves C).
void gemm_tile(int64_t m, int64_t n, int64_t k, const float* a, int64_t lda, const float* b,
               int64_t ldb, float* c, int64_t ldc, bool accumulate);

// The same with bfloat16 operands (bits in uint16_t) and float32 accumulation, at twice the rate
// and more where the CPU has bfloat16 dot products. B is packed in pairs of rows: element (k, n)
// lies at b[(k / 2) * 2 * ldb + 2 * n + k % 2]; k must be even. Only where has_bf16_tiles().
void gemm_tile(int64_t m, int64_t n, int64_t k, const uint16_t* a, int64_t lda, const uint16_t* b,
               int64_t ldb, float* c, int64_t ldc, bool accumulate);

// Whether this CPU multiplies bfloat16 tiles natively (AVX512_BF16 or AMX). Elsewhere kernels widen
// to float32 first, which is three times faster than the emulation.
bool has_bf16_tiles();

// To be called once by every thread that has used gemm_tile, when it is done (gives back AMX's tile
// registers).
void gemm_release();

}  // namespace tfm_kernels
