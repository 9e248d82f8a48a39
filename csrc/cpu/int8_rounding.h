// Rows rounded to 8-bit integers, 127 steps up to the largest: INT8_LINEAR.2 of
// tfm_kernels/ops/int8_linear.py.
#pragma once
#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "int8.h"
#include "transpose.h"

namespace tfm_kernels {
inline namespace CPU_CAPABILITY {
namespace {

constexpr int64_t kRoundedRows = 16;  // rows at a time of what lies turned

template <typename C>
using bits_t = std::conditional_t<std::is_same_v<C, float>, uint32_t, uint64_t>;

// The size of a step of a row whose largest element has these bits, without its sign, and the
// factor that makes numbers of steps, 0 for a row of zeros. NaN and infinities give a step of NaN.
template <typename C>
C step_of(bits_t<C> most, C& factor) {
  const C largest = std::bit_cast<C>(most);
  const bool finite = largest < std::numeric_limits<C>::infinity();
  factor = finite && largest >= C(0x1p-119) ? C(127) / largest : C(0);
  return finite ? largest / C(127) : std::numeric_limits<C>::quiet_NaN();
}

// The larger of `most` and |x|, as bits, by which NaN is larger than infinity, and infinity than
// numbers. (By value: of std::max()'s references gcc makes no vectors.)
template <typename C>
[[gnu::always_inline]] inline bits_t<C> larger_bits(bits_t<C> most, C x) {
  constexpr bits_t<C> kSign = bits_t<C>(1) << (8 * sizeof(C) - 1);
  const bits_t<C> bits = std::bit_cast<bits_t<C>>(x) & ~kSign;
  return most < bits ? bits : most;
}

// x in steps; 0 in a row of zeros and in one that is not finite. (gcc's own function is one
// instruction; clang lacks it.)
template <typename C>
[[gnu::always_inline]] inline int32_t in_steps(C x, C factor) {
#if __has_builtin(__builtin_irintf) && __has_builtin(__builtin_irint)
  if constexpr (std::is_same_v<C, float>)
    return factor != 0.0f ? __builtin_irintf(x * factor) : 0;
  else
    return factor != 0.0 ? __builtin_irint(x * factor) : 0;
#else
  return factor != C(0) ? static_cast<int32_t>(std::rint(x * factor)) : 0;
#endif
}

// x (k) rounded to integers of 127ths of its largest element, and `filled` of them in all, by 0;
// returns the size of a step.
template <typename P, typename C>
C round_row(const C* x, int64_t k, int64_t filled, typename P::E* out) {
  bits_t<C> most = 0;
#pragma omp simd reduction(max : most)
  for (int64_t i = 0; i < k; ++i) most = larger_bits(most, x[i]);
  C factor;
  const C step = step_of<C>(most, factor);
#pragma omp simd
  for (int64_t i = 0; i < k; ++i)
    out[i] = static_cast<typename P::E>(in_steps(x[i], factor) + static_cast<int32_t>(P::kOffset));
  std::fill(out + k, out + filled, static_cast<typename P::E>(P::kOffset));
  return step;
}

// Rounded rows from `rows` <= kPanelRows rows of x, `filled` integers each; `wide` has k elements.
// Steps of the rows that there are not, up to kPanelRows, are 0.
template <typename P, typename T, typename C = compute_t<T>>
void round_rows(const T* x, int64_t x_ld, int64_t rows, int64_t k, int64_t filled,
                [[maybe_unused]] C* wide, typename P::E* out, C* step) {
  for (int64_t r = 0; r < rows; ++r) {
    const C* row;
    if constexpr (std::is_same_v<T, C>) {
      row = x + r * x_ld;
    } else {
      widen(x + r * x_ld, k, wide);
      row = wide;
    }
    step[r] = round_row<P>(row, k, filled, out + r * filled);
  }
  std::fill(step + rows, step + kPanelRows, C(0));
}

// The panel of rows that were rounded.
template <typename P>
void turn_panel(const typename P::E* rounded, int64_t rows, int64_t filled, typename P::E* panel) {
  const int64_t groups = filled / P::kGroup;  // each as wide as a float, and nothing is computed
  transpose_widen(reinterpret_cast<const float*>(rounded), groups, rows, groups,
                  reinterpret_cast<float*>(panel), kPanelRows, kPanelRows);
}

// A panel from numbers that lie turned, x (k, ld), for `rows` <= kPanelRows of them, a multiple of
// kRoundedRows, which a factor each makes numbers of steps; integers k to `filled` are 0.
template <typename P, typename C>
void round_columns(int64_t k, int64_t filled, int64_t rows, const C* x, int64_t ld, const C* factor,
                   typename P::E* panel) {
  constexpr int kBits = 32 / P::kGroup;
  constexpr uint32_t kMask = 0xFFFFFFFFu >> (32 - kBits), kZero = static_cast<uint32_t>(P::kOffset);
  uint32_t* groups = reinterpret_cast<uint32_t*>(panel);
  for (int64_t r = 0; r < rows; r += kRoundedRows) {
    // group g of integers, of which `there` features are
    const auto round_group = [&](int64_t g, auto there) __attribute__((always_inline)) {
      alignas(64) uint32_t group[kRoundedRows] = {};
#pragma GCC unroll 4
      for (int64_t i = 0; i < P::kGroup; ++i) {
        const C* from = x + (g * P::kGroup + i) * ld + r;
#pragma omp simd
        for (int64_t l = 0; l < kRoundedRows; ++l) {
          const int32_t steps = i < there ? in_steps(from[l], factor[r + l]) : 0;
          group[l] |= ((static_cast<uint32_t>(steps) + kZero) & kMask) << (i * kBits);
        }
      }
      std::copy_n(group, kRoundedRows, groups + g * kPanelRows + r);
    };
    int64_t g = 0;
    for (; g < k / P::kGroup; ++g) round_group(g, std::integral_constant<int64_t, P::kGroup>{});
    for (; g < filled / P::kGroup; ++g) round_group(g, k - g * P::kGroup);
  }
}

}  // namespace
}  // namespace CPU_CAPABILITY
}  // namespace tfm_kernels
