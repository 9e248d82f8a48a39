// Products of weights, as they lie in memory, with a tile of rows.
#pragma once
#include <algorithm>

#include "isa.h"
#include "operand.h"

namespace tfm_kernels {

constexpr int64_t kMaxTileRows = 256;

// Rows of a tile: `most` or fewer, in multiples of 16, spread evenly over tiles whose number, where
// there are enough of them, is a multiple of the threads'.
inline int64_t tile_rows(int64_t rows, int64_t most, int64_t threads) {
  int64_t tiles = ceil_div(rows, most);
  if (tiles >= threads) tiles = round_up(tiles, threads);
  return round_up(ceil_div(rows, tiles), 16);
}

// Elements of working memory for weights with k columns as they are widened, block by block.
inline int64_t widened_room(int64_t k) { return std::max<int64_t>(32768, 16 * k); }

// Rows of a tile that lie side by side in a right operand: all of them, but where vectors hold 8
// numbers 32 (512 x 128 x 768 on one core of a Zen 3: 55 GFLOP/s whole, 67 by 64, 92 by 32 and by
// 16), and 64 where weights are widened for each.
inline int64_t panel_rows(int64_t tile, DType dtype) {
  if (isa() != Isa::avx2) return tile;
  return std::min<int64_t>(tile, dtype == DType::f32 ? 32 : kPanel);
}

inline namespace CPU_CAPABILITY {
namespace {

// Calls body(first row, width, rows that there are) for each panel of a tile that holds some of its
// `rows` rows.
template <typename Body>
void for_panels(int64_t tile, int64_t panel, int64_t rows, Body body) {
  for (int64_t p = 0; p < std::min(tile, rows); p += panel) {
    const int64_t width = std::min(panel, tile - p);
    body(p, width, std::min(width, rows - p));
  }
}

// The longest sum that one matrix tile of weights of type T forms over n columns; forward and the
// backward's recompute agree on it. Longer ones would push the tile's B operand (64 columns) out of
// L2 or, where vectors hold 8 numbers, 16 columns of it, which lie 64 apart, out of L1; float32
// there lies 32 apart. Over few columns, where the BLAS forms a dot product of many partial sums,
// short ones keep up with its precision and cost nothing beside reading A. Of float32, whose
// rounding nothing hides, sums of 1024 had up to 2.2 times the error of a BLAS (width 1024, Zen 4).
template <typename T>
int64_t longest_sum(int64_t n) {
  const bool single = std::is_same_v<T, float>;
  if (Vec::size() < 16) return single ? 512 : 128;
  return n <= 16 ? 128 : single ? 512 : 1024;
}

// The same for a product that is the whole result: one sum of 1024 products is less exact than a
// BLAS, and nothing else hides it.
template <typename T>
int64_t longest_bare_sum(int64_t n) {
  return std::min<int64_t>(256, longest_sum<T>(n));
}

// The same in the products of gradients, which go over kPanel columns.
constexpr int64_t kLongestGradientSum = Vec::size() < 16 ? 128 : 1024;

// C (m, n) = A (m, k) B (k, n), or += where `accumulate`; B a right operand as operand.h has it, k
// even where it is bfloat16. Sums of `longest` products are formed apart.
template <typename O, typename C>
void product(int64_t m, int64_t n, int64_t k, const O* a, int64_t lda, const O* b, int64_t ldb,
             C* c, int64_t ldc, bool accumulate, int64_t longest) {
  int64_t begin = 0;
  do {
    const int64_t length = std::min(k - begin, longest);
    gemm_tile(m, n, length, a + begin, lda, b + begin * ldb, ldb, c, ldc, accumulate || begin > 0);
    begin += length;
  } while (begin < k);
}

// How many elements of a 16-bit matrix with k columns are widened at a time; they fit L2 beside the
// tiles.
inline int64_t widened_rows(int64_t k) {
  return std::max<int64_t>(16, 32768 / std::max<int64_t>(k, 1) / 16 * 16);
}

// product() with A = weights in storage type: used where it lies, or widened block by block into
// `wide`, which has widened_room(k).
template <typename T, typename O, typename C = compute_t<T>>
void weights_product(int64_t m, int64_t n, int64_t k, const T* a, int64_t lda, const O* b,
                     int64_t ldb, C* c, int64_t ldc, bool accumulate, [[maybe_unused]] C* wide,
                     int64_t longest) {
  if constexpr (std::is_same_v<T, O>) {
    product(m, n, k, a, lda, b, ldb, c, ldc, accumulate, longest);
  } else {
    const int64_t step = widened_rows(k);
    for (int64_t i = 0; i < m; i += step) {
      const int64_t rows = std::min(step, m - i);
      for (int64_t r = 0; r < rows; ++r) widen(a + (i + r) * lda, k, wide + r * k);
      product(rows, n, k, wide, k, b, ldb, c + i * ldc, ldc, accumulate, longest);
    }
  }
}

}  // namespace
}  // namespace CPU_CAPABILITY
}  // namespace tfm_kernels
