// Products of 8-bit integers, exact: w x^T over weights and over rows that were rounded.
#pragma once
#include <algorithm>
#include <cstring>

#include "few_rows.h"
#include "int8.h"

namespace tfm_kernels {
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
void integer_products(int64_t n, int64_t rows, int64_t k, const int8_t* w, int64_t w_ld,
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
  for (int64_t r = 0; r < rows;) {
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

// out (n, ld) = sums times the step of row and feature, over `rows` rounded up to 16.
template <typename C>
void scale_sums(int64_t n, int64_t rows, const int32_t* sums, int64_t ld, const C* step,
                const float* scale, C* out) {
  for (int64_t f = 0; f < n; ++f) {
    const C of_feature = scale[f];
#pragma omp simd
    for (int64_t r = 0; r < round_up(rows, 16); ++r)
      out[f * ld + r] = static_cast<C>(sums[f * ld + r]) * (step[r] * of_feature);
  }
}

}  // namespace
}  // namespace CPU_CAPABILITY
}  // namespace tfm_kernels
