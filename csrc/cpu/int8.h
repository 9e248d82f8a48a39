// Products of 8-bit integers, exact: y = x w^T over rows x that were rounded to integers.
//
// A lane of the sums takes a group of neighbours at a time: four bytes where the processor has
// VNNI, which multiplies unsigned by signed ones, so that rows are kept 128 too large; else two
// 16-bit integers. Rows lie in panels of kPanelRows, group after group: element (row, k) at
// [(k / group * kPanelRows + row) * group + k % group]. Up to kDotRows of them lie as they are.
#pragma once
#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "few_rows.h"
#include "transpose.h"

namespace tfm_kernels {

constexpr int64_t kPanelRows = 32;
constexpr int64_t kIntegers = 64;  // rows and weights are filled up to a multiple of so many, by 0

// Whether the processor multiplies groups of four bytes (AVX512_VNNI).
bool has_vnni();

// Bytes that an integer of a row takes.
inline int64_t integer_bytes(bool vnni) { return vnni ? 1 : 2; }

inline namespace CPU_CAPABILITY {
namespace {

// How groups of integers are multiplied and added to vectors of sums. E: an integer of a row, W:
// one of the weights as a tile reads it. (`asm`, because this file is also compiled for processors
// that do not have the instruction.)
template <bool vnni>
struct Integers;

#if defined(CPU_CAPABILITY_AVX512)
struct Sums512 {
  using Sum = __m512i;
  static constexpr int64_t kLanes = 16;
  static Sum repeat(int32_t x) { return _mm512_set1_epi32(x); }
  static Sum loaded(const int32_t* p) { return _mm512_loadu_si512(p); }
  static void store(int32_t* p, Sum s) { _mm512_storeu_si512(p, s); }
  static Sum plus(Sum a, Sum b) { return _mm512_add_epi32(a, b); }
  static int32_t total(Sum s) { return _mm512_reduce_add_epi32(s); }
};

template <>
struct Integers<true> : Sums512 {
  using E = uint8_t;
  using W = int8_t;
  static constexpr int64_t kGroup = 4, kOffset = 128;
  static Sum load(const E* p) { return _mm512_loadu_si512(p); }
  static Sum weights(const int8_t* p) { return _mm512_loadu_si512(p); }
  static Sum add(Sum row, Sum weight, Sum sum) {
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(row), "v"(weight));
    return sum;
  }
  static Sum ones() { return _mm512_set1_epi8(1); }
};

template <>
struct Integers<false> : Sums512 {
  using E = int16_t;
  using W = int16_t;
  static constexpr int64_t kGroup = 2, kOffset = 0;
  static Sum load(const E* p) { return _mm512_loadu_si512(p); }
  static Sum weights(const int8_t* p) {
    return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static Sum add(Sum row, Sum weight, Sum sum) {
    return _mm512_add_epi32(sum, _mm512_madd_epi16(row, weight));
  }
  static Sum ones() { return _mm512_set1_epi16(1); }
};
#elif defined(CPU_CAPABILITY_AVX2)
template <>
struct Integers<false> {
  using E = int16_t;
  using W = int16_t;
  using Sum = __m256i;
  static constexpr int64_t kLanes = 8, kGroup = 2, kOffset = 0;
  static Sum repeat(int32_t x) { return _mm256_set1_epi32(x); }
  static Sum loaded(const int32_t* p) {
    return _mm256_loadu_si256(reinterpret_cast<const Sum*>(p));
  }
  static void store(int32_t* p, Sum s) { _mm256_storeu_si256(reinterpret_cast<Sum*>(p), s); }
  static Sum plus(Sum a, Sum b) { return _mm256_add_epi32(a, b); }
  static int32_t total(Sum s) {
    alignas(32) int32_t lanes[kLanes];
    store(lanes, s);
    int32_t sum = 0;
    for (int32_t lane : lanes) sum += lane;
    return sum;
  }
  static Sum load(const E* p) { return _mm256_loadu_si256(reinterpret_cast<const Sum*>(p)); }
  static Sum weights(const int8_t* p) {
    return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static Sum add(Sum row, Sum weight, Sum sum) {
    return _mm256_add_epi32(sum, _mm256_madd_epi16(row, weight));
  }
  static Sum ones() { return _mm256_set1_epi16(1); }
};
#else
template <>
struct Integers<false> {
  using E = int16_t;
  using W = int16_t;
  static constexpr int64_t kLanes = 8, kGroup = 2, kOffset = 0;
  using Sum = std::array<int32_t, kLanes>;
  static Sum repeat(int32_t x) {
    Sum s;
    s.fill(x);
    return s;
  }
  static Sum loaded(const int32_t* p) {
    return std::bit_cast<Sum>(*reinterpret_cast<const Sum*>(p));
  }
  static void store(int32_t* p, const Sum& s) { std::copy_n(s.data(), kLanes, p); }
  static Sum plus(Sum a, const Sum& b) {
    for (int64_t l = 0; l < kLanes; ++l) a[l] += b[l];
    return a;
  }
  static int32_t total(const Sum& s) {
    int32_t sum = 0;
    for (int32_t lane : s) sum += lane;
    return sum;
  }
  static Sum load(const E* p) {
    Sum s;
    std::memcpy(&s, p, sizeof s);
    return s;
  }
  static Sum weights(const int8_t* p) {
    E wide[2 * kLanes];
    std::copy_n(p, 2 * kLanes, wide);
    return load(wide);
  }
  static Sum add(const Sum& row, const Sum& weight, Sum sum) {
    E a[2 * kLanes], b[2 * kLanes];
    std::memcpy(a, &row, sizeof a);
    std::memcpy(b, &weight, sizeof b);
    for (int64_t l = 0; l < kLanes; ++l)
      sum[l] += a[2 * l] * b[2 * l] + a[2 * l + 1] * b[2 * l + 1];
    return sum;
  }
  static Sum ones() { return repeat(0x10001); }
};
#endif

// Calls body(Integers) for what the processor has.
template <typename Body>
void for_integers([[maybe_unused]] bool vnni, Body body) {
#if defined(CPU_CAPABILITY_AVX512)
  if (vnni) return body(Integers<true>{});
#endif
  body(Integers<false>{});
}

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

// most[i] = the larger of it and |x[i]|, as bits, by which NaN is larger than infinity, and
// infinity than numbers.
template <typename C>
void largest_bits(int64_t n, const C* x, bits_t<C>* most) {
  constexpr bits_t<C> kSign = bits_t<C>(1) << (8 * sizeof(C) - 1);
  const bits_t<C>* bits = reinterpret_cast<const bits_t<C>*>(x);
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) most[i] = std::max(most[i], bits[i] & ~kSign);
}

// x in steps; 0 in a row of zeros and in one that is not finite.
template <typename C>
[[gnu::always_inline]] inline int32_t in_steps(C x, C factor) {
  return static_cast<int32_t>(factor != C(0) ? std::rint(x * factor) : C(0));
}

// x (k) rounded to integers of 127ths of its largest element, and `filled` of them in all, by 0;
// returns the size of a step.
template <typename P, typename C>
C round_row(const C* x, int64_t k, int64_t filled, typename P::E* out) {
  constexpr bits_t<C> kSign = bits_t<C>(1) << (8 * sizeof(C) - 1);
  bits_t<C> most = 0;  // as in largest_bits
  const bits_t<C>* bits = reinterpret_cast<const bits_t<C>*>(x);
#pragma omp simd reduction(max : most)
  for (int64_t i = 0; i < k; ++i) most = std::max(most, bits[i] & ~kSign);
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

// A panel from numbers that lie turned, x (k, ld), for `rows` <= kPanelRows of them, which a
// factor each makes numbers of steps; integers k to `filled` are 0.
template <typename P, typename C>
void round_columns(int64_t k, int64_t filled, int64_t rows, const C* x, int64_t ld, const C* factor,
                   typename P::E* panel) {
  constexpr int kBits = 32 / P::kGroup;
  constexpr uint32_t kMask = 0xFFFFFFFFu >> (32 - kBits), kZero = static_cast<uint32_t>(P::kOffset);
  for (int64_t g = 0; g < filled / P::kGroup; ++g) {
    uint32_t* groups = reinterpret_cast<uint32_t*>(panel) + g * kPanelRows;
    std::fill_n(groups, kPanelRows, uint32_t(0));
    for (int64_t i = 0; i < P::kGroup; ++i) {
      const int64_t feature = g * P::kGroup + i;
      const C* from = x + feature * ld;
      if (feature < k) {
#pragma omp simd
        for (int64_t r = 0; r < rows; ++r)
          groups[r] |= ((static_cast<uint32_t>(in_steps(from[r], factor[r])) + kZero) & kMask)
                       << (i * kBits);
      } else {
        for (int64_t r = 0; r < rows; ++r) groups[r] |= kZero << (i * kBits);
      }
    }
  }
}

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

// Adds bias[f] to row f of h (n, ld).
template <typename T, typename C>
void add_to_rows(int64_t n, int64_t ld, const T* bias, C* h) {
  for (int64_t f = 0; f < n; ++f) {
    const C shift = static_cast<C>(bias[f]);
#pragma omp simd
    for (int64_t r = 0; r < ld; ++r) h[f * ld + r] += shift;
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
