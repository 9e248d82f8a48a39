// Products of a few rows with weights, as in decoding: y = x w^T.
//
// Every element is a dot product of two stretches of memory, so nothing is packed or turned. The
// weights are read once, in the order they lie, and each four rows of them are asked for while the
// four before are multiplied: what such a product costs is their way from L3 or memory.
#pragma once
#include <algorithm>

#include "gemm.h"
#include "prefetch.h"
#include "transpose.h"

namespace tfm_kernels {

// Rows of x at a time. Beyond, tiles of the matrix library are faster: 64 rows of 256-1024 took 327
// us here and 238 there, 32 rows 202 and 215 (2.6 GHz Xeon, AVX-512).
constexpr int64_t kFewRows = 32;
constexpr int64_t kFewRowsStrip = 64;  // features at a time
constexpr int64_t kFewRowsLength =
    1024;  // the longest sum formed at a time: a tile's rows stay in L1

// Elements of working memory for a strip of products with `rows` rows.
inline int64_t few_rows_room(int64_t rows) { return kFewRowsStrip * round_up(rows, 16); }

inline namespace CPU_CAPABILITY {
namespace {

// A tile: the products of four features with two or four rows, which is what registers hold.
constexpr int64_t kTileFeatures = 4;
template <typename C>
constexpr int64_t kTileRows = sizeof(at::vec::Vectorized<C>) == 32 ? 2 : 4;

// Lane i of the result is the sum of the lanes of v[i]; n vectors of n lanes.
template <typename V, int n>
[[gnu::always_inline]] inline V lane_sums(const V (&v)[n]) {
  if constexpr (n == 1) {
    return v[0];
  } else {
    V half[n / 2];
#pragma GCC unroll 8
    for (int i = 0; i < n / 2; ++i) {
      const auto [even, odd] = at::vec::deinterleave2(v[2 * i], v[2 * i + 1]);
      half[i] = even + odd;
    }
    return lane_sums(half);
  }
}

// sums[f * kTileRows + r] = the sum of w[f][i] x[r][i] over k elements; k a multiple of the lanes
// where `whole`. (Two functions, because gcc keeps the sums in memory where a rest may follow.)
template <bool whole, typename T, typename C = compute_t<T>>
void dot_tile(const T* const (&w)[kTileFeatures], const C* const (&x)[kTileRows<C>], int64_t k,
              C* sums) {
  using V = at::vec::Vectorized<C>;
  constexpr int64_t kRows = kTileRows<C>, kSums = kTileFeatures * kRows, kLanes = V::size();
  static_assert(kSums % kLanes == 0);
  V sum[kSums];
  for (V& s : sum) s = V(C(0));
  const auto step = [&](auto at) __attribute__((always_inline)) {
    V wide[kTileFeatures];
#pragma GCC unroll 4
    for (int64_t f = 0; f < kTileFeatures; ++f) wide[f] = at(w[f]);
#pragma GCC unroll 4
    for (int64_t r = 0; r < kRows; ++r) {
      const V factor = at(x[r]);
#pragma GCC unroll 4
      for (int64_t f = 0; f < kTileFeatures; ++f)
        sum[f * kRows + r] = at::vec::fmadd(wide[f], factor, sum[f * kRows + r]);
    }
  };
  int64_t i = 0;
  for (; i + kLanes <= k; i += kLanes) step([&](const auto* row) { return load_wide(row + i); });
  if constexpr (!whole)
    if (i < k) step([&](const auto* row) { return load_wide(row + i, k - i); });
#pragma GCC unroll 4
  for (int64_t s = 0; s < kSums; s += kLanes) {
    V part[kLanes];
#pragma GCC unroll 16
    for (int64_t l = 0; l < kLanes; ++l) part[l] = sum[s + l];
    lane_sums(part).store(sums + s);
  }
}

// out (n, ld) = w x^T, w (n, k) and `rows` rows of x, both with their elements side by side. ld is
// `rows` rounded up to 16; what the columns behind `rows` hold is finite where the last row is.
template <typename T, typename C = compute_t<T>>
void few_rows_product(int64_t n, int64_t rows, int64_t k, const T* w, int64_t w_ld, const C* x,
                      int64_t x_ld, C* out, int64_t ld) {
  constexpr int64_t kRows = kTileRows<C>;
  std::fill(out, out + n * ld, C(0));
  for (int64_t begin = 0; begin < k; begin += kFewRowsLength) {
    const int64_t length = std::min(k - begin, kFewRowsLength);
    // what each tile asks for of the next four features, behind the strip as well
    const int64_t ahead = round_up(ceil_div(length, ceil_div(rows, kRows)), kLine<T>);
    for (int64_t f = 0; f < n; f += kTileFeatures) {
      const T* features[kTileFeatures];
      for (int64_t i = 0; i < kTileFeatures; ++i)
        features[i] = w + std::min(f + i, n - 1) * w_ld + begin;  // the last one stands in
      for (int64_t r = 0, first = 0; r < rows; r += kRows, first += ahead) {
        for (const T* feature : features)
          prefetch(feature + kTileFeatures * w_ld + first, std::min(ahead, length - first));
        const C* factors[kRows];
        for (int64_t i = 0; i < kRows; ++i)
          factors[i] = x + std::min(r + i, rows - 1) * x_ld + begin;
        alignas(64) C sums[kTileFeatures * kRows];
        if (length % at::vec::Vectorized<C>::size() == 0)
          dot_tile<true>(features, factors, length, sums);
        else
          dot_tile<false>(features, factors, length, sums);
        for (int64_t i = 0; i < std::min(kTileFeatures, n - f); ++i)
#pragma omp simd
          for (int64_t j = 0; j < kRows; ++j) out[(f + i) * ld + r + j] += sums[i * kRows + j];
      }
    }
  }
}

// x as the products take it: where it lies, or widened into `room` (rows, k); its leading dimension
// in `ld`.
template <typename T, typename C = compute_t<T>>
const C* few_rows_operand(const T* x, int64_t rows, int64_t k, [[maybe_unused]] C* room,
                          int64_t& ld) {
  if constexpr (std::is_same_v<T, C>) {
    return x;
  } else {
    for (int64_t r = 0; r < rows; ++r) widen(x + r * ld, k, room + r * k);
    ld = k;
    return room;
  }
}

// Features begin..end - 1 of y = x w^T + bias, w (., k) contiguous, each rounded once; bias may be
// null. `room`: few_rows_room(rows).
template <typename T, typename C = compute_t<T>>
void few_rows_linear(int64_t begin, int64_t end, int64_t rows, int64_t k, const C* x, int64_t x_ld,
                     const T* w, const T* bias, T* y, int64_t y_ld, C* room) {
  const int64_t ld = round_up(rows, 16);
  for (int64_t f = begin; f < end; f += kFewRowsStrip) {
    const int64_t n = std::min(kFewRowsStrip, end - f);
    few_rows_product(n, rows, k, w + f * k, k, x, x_ld, room, ld);
    transpose_narrow(room, ld, rows, n, bias ? bias + f : nullptr, y + f, y_ld);
  }
}

}  // namespace
}  // namespace CPU_CAPABILITY
}  // namespace tfm_kernels
