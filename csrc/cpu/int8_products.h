// Products of 8-bit integers, exact: w x^T over weights and over rows that were rounded.
#pragma once
#include <algorithm>
#include <cstring>

#include "few_rows.h"
#include "gemm.h"
#include "int8.h"

namespace tfm_kernels {

// The best that the processor has; without tiles, which take as long for 16 rows as for one, where
// rows lie as they are.
inline IntegerUnit integer_unit(int64_t rows) {
  if (!has_vnni()) return IntegerUnit::pairs;
  return has_int8_tiles() && rows > kDotRows ? IntegerUnit::tiles : IntegerUnit::groups;
}

// Rows of packed products at a time: their sums with a panel of features fit L1.
constexpr int64_t kPackedRows = 128;

inline namespace CPU_CAPABILITY {
namespace {

#if defined(CPU_CAPABILITY_AVX512)
constexpr int64_t kIntegerFeatures = 12;
#else
constexpr int64_t kIntegerFeatures = 6;
#endif
constexpr int64_t kIntegerLength = 512;  // integers of a row multiplied at a time

// out (n, ld) = or += w x over `groups` groups, n <= kIntegerFeatures, for kVectors vectors of a
// panel's rows; `less` is added to every sum of a feature.
template <typename P, int64_t kVectors>
void integer_tile(int64_t n, int64_t groups,
                  const typename P::W (&w)[kIntegerFeatures][kIntegerLength],
                  const int32_t (&less)[kIntegerFeatures], const typename P::E* x, int32_t* out,
                  int64_t ld, bool accumulate) {
  using Sum = typename P::Sum;
  Sum sum[kIntegerFeatures * kVectors];
#pragma GCC unroll 12
  for (int64_t f = 0; f < kIntegerFeatures; ++f)
#pragma GCC unroll 2
    for (int64_t v = 0; v < kVectors; ++v) sum[f * kVectors + v] = P::repeat(less[f]);
  for (int64_t g = 0; g < groups; ++g) {
    Sum row[kVectors];
#pragma GCC unroll 2
    for (int64_t v = 0; v < kVectors; ++v)
      row[v] = P::load(x + (g * kPanelRows + v * P::kLanes) * P::kGroup);
#pragma GCC unroll 12
    for (int64_t f = 0; f < kIntegerFeatures; ++f) {
      int32_t group;
      std::memcpy(&group, w[f] + g * P::kGroup, sizeof group);
      const Sum weight = P::repeat(group);
#pragma GCC unroll 2
      for (int64_t v = 0; v < kVectors; ++v)
        sum[f * kVectors + v] = P::add(row[v], weight, sum[f * kVectors + v]);
    }
  }
#pragma GCC unroll 12
  for (int64_t f = 0; f < kIntegerFeatures; ++f) {
    if (f >= n) break;
#pragma GCC unroll 2
    for (int64_t v = 0; v < kVectors; ++v) {
      int32_t* place = out + f * ld + v * P::kLanes;
      P::store(place, accumulate ? P::plus(P::loaded(place), sum[f * kVectors + v])
                                 : sum[f * kVectors + v]);
    }
  }
}

// The sum of n weights, a multiple of kIntegers.
template <typename P>
int32_t weight_sum(const int8_t* w, int64_t n) {
  constexpr int64_t kStep = P::kLanes * P::kGroup;
  typename P::Sum sum = P::repeat(0);
  for (int64_t i = 0; i < n; i += kStep) sum = P::add(P::ones(), P::weights(w + i), sum);
  return P::total(sum);
}

// out (n, ld) = w x^T, w (n, k), for the first `rows` rows of panels that follow each other.
template <typename P>
void vector_products(int64_t n, int64_t rows, int64_t k, const int8_t* w, int64_t w_ld,
                     const typename P::E* panels, int64_t filled, int32_t* out, int64_t ld) {
  alignas(64) typename P::W weights[kIntegerFeatures][kIntegerLength];
  alignas(64) int8_t whole[kIntegerLength];
  for (int64_t f = 0; f < n; f += kIntegerFeatures) {
    const int64_t features = std::min(kIntegerFeatures, n - f);
    for (int64_t begin = 0; begin < std::max<int64_t>(filled, 1); begin += kIntegerLength) {
      const int64_t length = std::min(kIntegerLength, filled - begin);
      const int64_t real = std::min(kIntegerLength, k - begin);
      int32_t less[kIntegerFeatures];
      for (int64_t i = 0; i < kIntegerFeatures; ++i) {
        const int8_t* from = w + (f + std::min(i, features - 1)) * w_ld + begin;  // the last one
        if (real < length) {                                                      // stands in
          std::memcpy(whole, from, real);
          std::memset(whole + real, 0, length - real);
          from = whole;
        }
        std::copy_n(from, length, weights[i]);
        less[i] = P::kOffset ? static_cast<int32_t>(-P::kOffset) * weight_sum<P>(from, length) : 0;
      }
      const int64_t groups = length / P::kGroup;
      for (int64_t r = 0; r < rows; r += kPanelRows) {
        const typename P::E* panel = panels + r * filled + begin * kPanelRows;
        constexpr int64_t kWide = 2 * P::kLanes;
        for (int64_t c = 0; c < std::min(kPanelRows, rows - r); c += kWide) {
          const typename P::E* x = panel + c * P::kGroup;
          int32_t* place = out + f * ld + r + c;
          if (rows - r - c <= P::kLanes)
            integer_tile<P, 1>(features, groups, weights, less, x, place, ld, begin > 0);
          else
            integer_tile<P, 2>(features, groups, weights, less, x, place, ld, begin > 0);
        }
      }
    }
  }
}

// The same by the matrix library, n <= kFewRowsStrip. Weights are read where they lie, but for
// those of a group that is not whole.
inline void tile_products(int64_t n, int64_t rows, int64_t k, const int8_t* w, int64_t w_ld,
                          const int8_t* panels, int64_t filled, int32_t* out, int64_t ld) {
  constexpr int64_t kGroup = 4;
  const int64_t whole = k / kGroup * kGroup;
  int8_t rest[kFewRowsStrip * kGroup] = {};
  if (whole < k)
    for (int64_t f = 0; f < n; ++f) std::memcpy(rest + f * kGroup, w + f * w_ld + whole, k - whole);
  for (int64_t r = 0; r < rows; r += kPanelRows) {
    const int64_t width = rows - r <= 16 ? 16 : kPanelRows;
    const int8_t* panel = panels + r * filled;
    gemm_tile(n, width, whole, w, w_ld, panel, kPanelRows, out + r, ld, false);
    if (whole < k)
      gemm_tile(n, width, kGroup, rest, kGroup, panel + whole * kPanelRows, kPanelRows, out + r, ld,
                true);
  }
}

// Dot products of kRows rows with one feature after the other, whose integers lie side by side.
template <typename P, int64_t kRows>
void integer_dots(int64_t n, int64_t k, const int8_t* w, int64_t w_ld, const typename P::E* x,
                  int64_t filled, int32_t* out, int64_t ld) {
  using Sum = typename P::Sum;
  constexpr int64_t kStep = P::kLanes * P::kGroup;
  const int64_t whole = k / kStep * kStep;
  for (int64_t f = 0; f < n; ++f) {
    Sum sum[kRows + 1];  // the last one: of the weights themselves
#pragma GCC unroll 5
    for (Sum& s : sum) s = P::repeat(0);
    const auto step = [&](const int8_t* from, int64_t i) __attribute__((always_inline)) {
      const Sum weight = P::weights(from);
#pragma GCC unroll 4
      for (int64_t r = 0; r < kRows; ++r)
        sum[r] = P::add(P::load(x + r * filled + i), weight, sum[r]);
      if constexpr (P::kOffset != 0) sum[kRows] = P::add(P::ones(), weight, sum[kRows]);
    };
    const int8_t* row = w + f * w_ld;
    for (int64_t i = 0; i < whole; i += kStep) step(row + i, i);
    if (whole < k) {
      alignas(64) int8_t rest[kStep] = {};
      std::memcpy(rest, row + whole, k - whole);
      step(rest, whole);
    }
    // sums of rows that are 128 too large may have gone beyond int32, and come back here
    const uint32_t less =
        P::kOffset ? static_cast<uint32_t>(P::kOffset) * static_cast<uint32_t>(P::total(sum[kRows]))
                   : 0;
    for (int64_t r = 0; r < kRows; ++r)
      out[f * ld + r] = static_cast<int32_t>(static_cast<uint32_t>(P::total(sum[r])) - less);
  }
}

// out (n, ld) = w x^T for at most kDotRows rows that lie as they are, `filled` integers apart.
template <typename P>
void integer_dots(int64_t n, int64_t rows, int64_t k, const int8_t* w, int64_t w_ld,
                  const typename P::E* x, int64_t filled, int32_t* out, int64_t ld) {
  int64_t r = 0;
  while (r < rows) {
    const auto take = [&](auto some) {
      integer_dots<P, some()>(n, k, w, w_ld, x + r * filled, filled, out + r, ld);
      r += some();
    };
    if (rows - r >= 4)
      take(std::integral_constant<int64_t, 4>{});
    else if (rows - r >= 2)
      take(std::integral_constant<int64_t, 2>{});
    else
      take(std::integral_constant<int64_t, 1>{});
  }
}

// The same for rows as they were rounded: `turned` into panels, or, without tiles, as they lie.
template <typename P>
void integer_products(int64_t n, int64_t rows, int64_t k, const int8_t* w, int64_t w_ld,
                      const typename P::E* x, int64_t filled, [[maybe_unused]] bool turned,
                      int32_t* out, int64_t ld) {
  if constexpr (P::kTiles)
    tile_products(n, rows, k, w, w_ld, x, filled, out, ld);
  else if (turned)
    vector_products<P>(n, rows, k, w, w_ld, x, filled, out, ld);
  else
    integer_dots<P>(n, rows, k, w, w_ld, x, filled, out, ld);
}

// n <= kMost numbers of a row of y: sums times the steps of row and feature, plus bias, each
// rounded once. S: an integer, or a float that holds its bits.
template <int64_t kMost, typename S, typename T, typename C = compute_t<T>>
void scale_row(int64_t n, const S* sums, C of_row, const C* of_feature, const C* bias, T* y) {
  alignas(64) C out[kMost];
  const auto scale = [&](auto count) __attribute__((always_inline)) {
#pragma omp simd
    for (int64_t j = 0; j < count; ++j)
      out[j] = static_cast<C>(std::bit_cast<int32_t>(sums[j])) * (of_row * of_feature[j]) + bias[j];
    narrow(out, count, y);
  };
  if (n == kMost)  // mostly, and then the compiler knows it
    scale(std::integral_constant<int64_t, kMost>{});
  else
    scale(n);
}

// y (rows, n) from sums (n, ld), n <= kFewRowsStrip; bias may be null.
template <typename T, typename C = compute_t<T>>
void finish_sums(int64_t n, int64_t rows, const int32_t* sums, int64_t ld, const C* step,
                 const float* scale, const T* bias, T* y, int64_t y_ld) {
  alignas(64) C of_feature[kFewRowsStrip], shift[kFewRowsStrip] = {};
  std::copy_n(scale, n, of_feature);
  if (bias) widen(bias, n, shift);
  // integers lie in as many bits as a float, and nothing is computed before they are floats
  transposed_rows(reinterpret_cast<const float*>(sums), ld, rows, n,
                  [&](int64_t r, int64_t c, int64_t columns, const float* row) {
                    scale_row<kTransposedColumns>(columns, row, step[r], of_feature + c, shift + c,
                                                  y + r * y_ld + c);
                  });
}

// Features begin..end - 1 of y (rows, y_ld) from rounded rows, as integer_products() takes them,
// and their steps. `sums`: kFewRowsStrip for each row, as many of them as rows filled up to whole
// panels.
template <typename P, typename T, typename C = compute_t<T>>
void integer_linear(int64_t begin, int64_t end, int64_t rows, int64_t k, const int8_t* w,
                    int64_t w_ld, const typename P::E* x, int64_t filled, bool turned,
                    const C* step, const float* scale, const T* bias, T* y, int64_t y_ld,
                    int32_t* sums) {
  // sums of tiles stay in L1; vectors copy weights first, for all rows
  const int64_t part = P::kTiles ? kPanelRows : rows;
  for (int64_t f = begin; f < end; f += kFewRowsStrip) {
    const int64_t n = std::min(kFewRowsStrip, end - f);
    for (int64_t r = 0; r < rows; r += part) {
      const int64_t some = std::min(part, rows - r), ld = round_up(some, 16);
      integer_products<P>(n, some, k, w + f * w_ld, w_ld, x + r * filled, filled, turned, sums, ld);
      finish_sums(n, some, sums, ld, step + r, scale + f, bias ? bias + f : nullptr,
                  y + r * y_ld + f, y_ld);
    }
  }
}

// Features begin..end - 1 of y (rows, y_ld), `begin` a whole panel, from rounded rows that lie as
// they are and panels of weights, both `filled` integers long; tiles alone. More rows than there
// are may be read, up to a whole panel. `sums`: (kPackedRows, kPanelRows).
template <typename T, typename C = compute_t<T>>
void packed_linear(int64_t begin, int64_t end, int64_t rows, const int8_t* packed, const int8_t* x,
                   int64_t filled, const C* step, const float* scale, const T* bias, T* y,
                   int64_t y_ld, int32_t* sums) {
  for (int64_t r = 0; r < rows; r += kPackedRows) {
    const int64_t some = std::min(kPackedRows, rows - r);
    for (int64_t f = begin; f < end; f += kPanelRows) {
      const int64_t n = std::min(kPanelRows, end - f);
      // few sizes, because the matrix library compiles code for each
      gemm_tile(round_up(some, kPanelRows), kPanelRows, filled, x + r * filled, filled,
                packed + f * filled, kPanelRows, sums, kPanelRows, false);
      alignas(64) C of_feature[kPanelRows], shift[kPanelRows] = {};
      std::copy_n(scale + f, n, of_feature);
      if (bias) widen(bias + f, n, shift);
      for (int64_t i = 0; i < some; ++i)
        scale_row<kPanelRows>(n, sums + i * kPanelRows, step[r + i], of_feature, shift,
                              y + (r + i) * y_ld + f);
    }
  }
}

}  // namespace
}  // namespace CPU_CAPABILITY
}  // namespace tfm_kernels
