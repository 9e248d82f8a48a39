// Transposed copies between storage and compute type, in blocks that stay in L1.
#pragma once
#include <cstring>

#include "vec.h"

namespace tfm_kernels {
inline namespace CPU_CAPABILITY {
namespace {

constexpr int64_t kTransposeBlock = 16;
constexpr int64_t kTransposedColumns = 64;  // at a time

// dst[j][i] = src[i][j]. C is their width: callers have integers turned as floats. Vectors are read
// whatever lies there, and so is one element at a time by memcpy alone.
template <typename C>
void transpose_block(const C* src, int64_t src_ld, int64_t rows, int64_t columns, C* dst,
                     int64_t dst_ld) {
#if defined(CPU_CAPABILITY_AVX512) || defined(CPU_CAPABILITY_AVX2)
  if constexpr (std::is_same_v<C, float>) {
    if (rows == kTransposeBlock && columns == kTransposeBlock)
      at::vec::transpose_mxn<float, kTransposeBlock, kTransposeBlock>(src, src_ld, dst, dst_ld);
    else
      at::vec::transpose_mxn<float>(src, src_ld, dst, dst_ld, static_cast<int>(rows),
                                    static_cast<int>(columns));
    return;
  }
#endif
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < columns; ++j)
      std::memcpy(dst + j * dst_ld + i, src + i * src_ld + j, sizeof(C));
}

// dst[c][r] = src[r][c], widened; columns `rows` to `padded` of dst are zeroed.
template <typename T>
void transpose_widen(const T* src, int64_t src_ld, int64_t rows, int64_t columns, compute_t<T>* dst,
                     int64_t dst_ld, int64_t padded) {
  using C = compute_t<T>;
  constexpr int64_t kB = kTransposeBlock, kWide = kTransposedColumns;
  for (int64_t r = 0; r < rows; r += kB) {
    const int64_t m = rows - r < kB ? rows - r : kB;
    for (int64_t c = 0; c < columns; c += kWide) {
      const int64_t n = columns - c < kWide ? columns - c : kWide;
      const C* block;
      int64_t block_ld = src_ld;
      alignas(64) C wide[std::is_same_v<T, C> ? 1 : kB * kWide];
      if constexpr (std::is_same_v<T, C>) {
        block = src + r * src_ld + c;
      } else {
        for (int64_t i = 0; i < m; ++i) widen(src + (r + i) * src_ld + c, n, wide + i * kWide);
        block = wide;
        block_ld = kWide;
      }
      for (int64_t j = 0; j < n; j += kB)
        transpose_block(block + j, block_ld, m, n - j < kB ? n - j : kB, dst + (c + j) * dst_ld + r,
                        dst_ld);
    }
  }
  if (padded > rows)
    for (int64_t c = 0; c < columns; ++c)
      for (int64_t r = rows; r < padded; ++r) dst[c * dst_ld + r] = C(0);
}

// Calls row(r, c, n, numbers) for every row r of src^T and n columns of it, from c on, up to 64 at
// a time: numbers[j] = src[c + j][r].
template <typename C, typename Row>
void transposed_rows(const C* src, int64_t src_ld, int64_t rows, int64_t columns, Row row) {
  constexpr int64_t kB = kTransposeBlock, kWide = kTransposedColumns;
  alignas(64) C wide[kB * kWide];
  for (int64_t c = 0; c < columns; c += kWide) {
    const int64_t n = columns - c < kWide ? columns - c : kWide;
    for (int64_t r = 0; r < rows; r += kB) {
      const int64_t m = rows - r < kB ? rows - r : kB;
      for (int64_t j = 0; j < n; j += kB)
        transpose_block(src + (c + j) * src_ld + r, src_ld, n - j < kB ? n - j : kB, m, wide + j,
                        kWide);
      for (int64_t i = 0; i < m; ++i) row(r + i, c, n, wide + i * kWide);
    }
  }
}

// dst[r][c] = src[c][r] + bias[c], rounded once; bias may be null.
template <typename T>
void transpose_narrow(const compute_t<T>* src, int64_t src_ld, int64_t rows, int64_t columns,
                      const T* bias, T* dst, int64_t dst_ld) {
  using C = compute_t<T>;
  constexpr int64_t kB = kTransposeBlock;
  if constexpr (std::is_same_v<T, C>)
    if (!bias) {
      for (int64_t r = 0; r < rows; r += kB)
        for (int64_t c = 0; c < columns; c += kB)
          transpose_block(src + c * src_ld + r, src_ld, columns - c < kB ? columns - c : kB,
                          rows - r < kB ? rows - r : kB, dst + r * dst_ld + c, dst_ld);
      return;
    }
  transposed_rows(src, src_ld, rows, columns, [&](int64_t r, int64_t c, int64_t n, const C* row) {
    T* out = dst + r * dst_ld + c;
    if (!bias) return narrow(row, n, out);
    for_lanes<T>(n, [&]<typename V>(int64_t j) {
      store(out + j, load<V>(row + j) + load<V>(bias + c + j));
    });
  });
}

}  // namespace
}  // namespace CPU_CAPABILITY
}  // namespace tfm_kernels
