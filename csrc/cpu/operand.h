// What matrix tiles multiply: the compute type, or bfloat16 as it is stored, where the CPU does
// that in hardware.
//
// A left operand lies row-major. So does a right operand of the compute type; one of bfloat16 lies
// in pairs of rows: element (k, n) at [(k / 2) * 2 * ld + 2 * n + k % 2]. Row k, for even k, begins
// at k * ld either way, and column n at kPair<O> * n.
#pragma once
#include <algorithm>
#include <bit>
#include <initializer_list>

#include "gemm.h"
#include "transpose.h"
#include "vec.h"

namespace tfm_kernels {

template <typename O>
constexpr int64_t kPair = std::is_same_v<O, bf16_t> ? 2 : 1;

// Whether the tiles of a call multiply bfloat16 as it is stored: neighbours that become a pair are
// `even` in number.
inline bool takes_bf16_tiles(DType dtype, std::initializer_list<int64_t> even) {
  return dtype == DType::bf16 && has_bf16_tiles() &&
         std::all_of(even.begin(), even.end(), [](int64_t n) { return n % 2 == 0; });
}

// Calls `body` with a value of the storage type that `dtype` names and one of its operands' type.
template <typename Body>
decltype(auto) for_operands(DType dtype, bool bf16_tiles, Body&& body) {
  if (dtype == DType::bf16 && bf16_tiles) return body(bf16_t{}, bf16_t{});
  return for_dtype(dtype, [&](auto zero) { return body(zero, compute_t<decltype(zero)>{}); });
}

inline namespace CPU_CAPABILITY {
namespace {

inline void gemm_tile(int64_t m, int64_t n, int64_t k, const bf16_t* a, int64_t lda,
                      const bf16_t* b, int64_t ldb, float* c, int64_t ldc, bool accumulate) {
  tfm_kernels::gemm_tile(m, n, k, reinterpret_cast<const uint16_t*>(a), lda,
                         reinterpret_cast<const uint16_t*>(b), ldb, c, ldc, accumulate);
}
using tfm_kernels::gemm_tile;

// A right operand (columns, rows) from src (rows, columns): turned. Columns `rows` to `padded` of
// it are zeros. bfloat16: src_ld and `columns` are even.
template <typename O, typename T>
void turn_right(const T* src, int64_t src_ld, int64_t rows, int64_t columns, O* dst, int64_t dst_ld,
                int64_t padded) {
  if constexpr (std::is_same_v<O, compute_t<T>>)
    transpose_widen(src, src_ld, rows, columns, dst, dst_ld, padded);
  else  // a pair is as wide as a float, and nothing is computed
    transpose_widen(reinterpret_cast<const float*>(src), src_ld / 2, rows, columns / 2,
                    reinterpret_cast<float*>(dst), dst_ld, padded);
}

// The nearest bfloat16, in the upper half; ties to even, NaN stays NaN.
inline uint32_t round_bf16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t rounded = bits + 0x7FFFu + ((bits >> 16) & 1u);
  return (bits & 0x7FFFFFFFu) > 0x7F800000u ? bits | 0x400000u : rounded;
}

inline uint32_t bf16_bits(float value) { return round_bf16(value) >> 16; }
inline uint32_t bf16_bits(bf16_t value) { return value.x; }

// Two rows of n numbers, rounded, as one pair of rows of a right operand; no `odd`: zeros.
template <typename S>
void pair_rows(const S* even, const S* odd, int64_t n, bf16_t* dst) {
#if defined(CPU_CAPABILITY_AVX512)
  if constexpr (std::is_same_v<S, float>) {
    const __m512i order =
        _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                         21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    for (int64_t j = 0; j < n; j += Vec::size()) {
      const __mmask16 there = n - j < Vec::size() ? (1u << (n - j)) - 1u : 0xFFFFu;
      const __m512 low = _mm512_maskz_loadu_ps(there, even + j);
      const __m512 high = odd ? _mm512_maskz_loadu_ps(there, odd + j) : _mm512_setzero_ps();
      const __m512i pairs = _mm512_permutexvar_epi16(order, operands(low, high));
      _mm512_mask_storeu_epi32(dst + 2 * j, there, pairs);
    }
    return;
  }
#endif
  uint32_t* pairs = reinterpret_cast<uint32_t*>(dst);
  if (odd) {
#pragma omp simd
    for (int64_t j = 0; j < n; ++j) pairs[j] = bf16_bits(even[j]) | bf16_bits(odd[j]) << 16;
  } else {
    for (int64_t j = 0; j < n; ++j) pairs[j] = bf16_bits(even[j]);
  }
}

// A left operand (columns, rows) from src (rows, columns): turned. bfloat16: dst_ld is even, and an
// odd row is followed by zeros.
template <typename O, typename S>
void turn_left(const S* src, int64_t src_ld, int64_t rows, int64_t columns, O* dst,
               int64_t dst_ld) {
  if constexpr (!std::is_same_v<O, bf16_t>) {
    transpose_widen(src, src_ld, rows, columns, dst, dst_ld, rows);
  } else {
    constexpr int64_t kRows = 2 * kTransposeBlock, kColumns = 64;
    alignas(64) bf16_t pairs[kRows * kColumns];
    for (int64_t r = 0; r < rows; r += kRows)
      for (int64_t c = 0; c < columns; c += kColumns) {
        const int64_t m = std::min(kRows, rows - r), n = std::min(kColumns, columns - c);
        for (int64_t i = 0; i < m; i += 2) {
          const S* even = src + (r + i) * src_ld + c;
          pair_rows(even, i + 1 < m ? even + src_ld : nullptr, n, pairs + i * kColumns);
        }
        transpose_widen(reinterpret_cast<const float*>(pairs), kColumns, ceil_div(m, 2), n,
                        reinterpret_cast<float*>(dst + c * dst_ld + r), dst_ld / 2, ceil_div(m, 2));
      }
  }
}

// n numbers as part of a left operand: where they lie, or rounded into `room`.
template <typename O, typename C>
const O* as_left(const C* values, [[maybe_unused]] int64_t n, [[maybe_unused]] O* room) {
  if constexpr (std::is_same_v<O, C>) {
    return values;
  } else {
    int64_t i = 0;
    for (; i + 2 * Vec::size() <= n; i += 2 * Vec::size())
      operands(Vec::loadu(values + i), Vec::loadu(values + i + Vec::size())).store(room + i);
    if (const int rest = static_cast<int>(n - i); rest > 0) {
      const int more = std::max<int>(rest - Vec::size(), 0);
      const Vec low = Vec::loadu(values + i, rest - more);
      operands(low, Vec::loadu(values + i + Vec::size(), more)).store(room + i, rest);
    }
    return room;
  }
}

// A right operand (n, ld), n even, of numbers that lie row-major: where they lie, or rounded into
// `room`.
template <typename O, typename C>
const O* as_right(const C* values, [[maybe_unused]] int64_t n, [[maybe_unused]] int64_t ld,
                  [[maybe_unused]] O* room) {
  if constexpr (std::is_same_v<O, C>) {
    return values;
  } else {
    for (int64_t i = 0; i < n; i += 2)
      pair_rows(values + i * ld, values + (i + 1) * ld, ld, room + i * ld);
    return room;
  }
}

}  // namespace
}  // namespace CPU_CAPABILITY
}  // namespace tfm_kernels
