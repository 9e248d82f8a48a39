// Products of a few rows with weights, as in decoding: y = x w^T.
//
// What such a product costs is the weights' way from L3 or memory, so they are read once, in the
// order they lie, and asked for ahead. Up to kDotRows rows: every element is a dot product, nothing
// is packed or turned; one row takes a feature after the other, more take some features at once.
// Beyond: x is turned, so that a vector holds rows, and each weight multiplies whole vectors. Tiles
// of bfloat16, where they are the better ones, take x turned whatever its rows.
#pragma once
#include <algorithm>
#include <cstring>

#include "isa.h"
#include "operand.h"
#include "prefetch.h"
#include "weights.h"

namespace tfm_kernels {

// Rows of x at a time. Beyond, tiles of the matrix library are faster: 64 rows of 256-1024 took 327
// us here and 238 there, 32 rows 202 and 215 (2.6 GHz Xeon, AVX-512).
constexpr int64_t kFewRows = 32;
constexpr int64_t kDotRows = 8;
constexpr int64_t kFewRowsStrip = 96;  // features at a time, a multiple of every tile's

// Whether the products below serve so few rows of bfloat16 that the CPU multiplies as it is stored.
// The matrix library's tiles are 16 rows wide: by AMX that costs nothing, by AVX512_BF16 it does,
// and weights whose rows lie a power of two apart fall on the same lines of L1 (Zen 4: 1 row of
// 768-3072 took 547 us in tiles and 108 here, 10 rows of 512-2048 484 and 284, 20 rows of 1024-4096
// 715 and 804).
inline bool outruns_bf16_tiles(int64_t rows) {
  return rows <= 16 && isa() == Isa::avx512 && !has_amx();
}

// Whether the products of this many rows of operands O are the matrix library's.
template <typename O>
bool takes_tiles(int64_t rows) {
  return std::is_same_v<O, bf16_t> && !outruns_bf16_tiles(rows);
}

// Whether they take x turned.
template <typename O>
bool turns_rows(int64_t rows) {
  return rows > kDotRows || takes_tiles<O>(rows);
}

// Elements of working memory for a strip of products with `rows` rows.
inline int64_t few_rows_room(int64_t rows) { return kFewRowsStrip * round_up(rows, 16); }

// Elements of working memory for x as the products take it.
inline int64_t few_rows_operand_room(int64_t rows, int64_t k) { return k * round_up(rows, 16); }

inline namespace CPU_CAPABILITY {
namespace {

// Whether bfloat16 can be multiplied here as it is stored without tiles.
#if defined(CPU_CAPABILITY_AVX512)
constexpr bool kPairProducts = true;
#else
constexpr bool kPairProducts = false;
#endif

// How vectors of operands are multiplied and added to vectors of sums.
template <typename O>
struct Products {
  using Sum = at::vec::Vectorized<O>;
  using Factor = Sum;
  static constexpr int64_t kLength = Factor::size();

  template <typename T>
  static Factor load(const T* p) {
    return load_wide(p);
  }
  template <typename T>
  static Factor load(const T* p, int64_t n) {
    return load_wide(p, n);
  }
  static Factor repeat(const O* p) { return Factor(*p); }
  static Sum add(const Factor& a, const Factor& b, const Sum& sum) {
    return at::vec::fmadd(a, b, sum);
  }
};

#if defined(CPU_CAPABILITY_AVX512)
// bfloat16 as it is stored: a lane of the sums takes two neighbours at a time.
template <>
struct Products<bf16_t> {
  using Sum = Vec;
  using Factor = __m512i;
  static constexpr int64_t kLength = 32;

  static Factor load(const bf16_t* p) { return _mm512_loadu_si512(p); }
  static Factor load(const bf16_t* p, int64_t n) {
    return _mm512_maskz_loadu_epi16(static_cast<__mmask32>((1u << n) - 1), p);
  }
  static Factor repeat(const bf16_t* p) {
    int pair;
    std::memcpy(&pair, p, sizeof pair);
    return _mm512_set1_epi32(pair);
  }
  static Sum add(const Factor& a, const Factor& b, const Sum& sum) {
    // by its name, because this file is also compiled for processors that do not have it
    __m512 out = sum;
    asm("vdpbf16ps %2, %1, %0" : "+v"(out) : "v"(a), "v"(b));
    return out;
  }
};
#endif

constexpr int64_t kDotLength = 1024;  // the longest sum formed at a time: a tile's rows stay in L1
// A tile: the products of some features with some rows, as many as registers hold.
template <typename C>
constexpr int64_t kDotSums = sizeof(at::vec::Vectorized<C>) == 32 ? 8 : 16;

// sums[f * kRows + r] = the sum of w[f][i] x[r][i] over k elements; k a multiple of the factors'
// length where `whole`. (Two functions, because gcc keeps the sums in memory where a rest may
// follow.)
template <bool whole, int64_t kFeatures, int64_t kRows, typename T, typename O,
          typename C = compute_t<T>>
void dot_tile(const T* const (&w)[kFeatures], const O* const (&x)[kRows], int64_t k, C* sums) {
  using P = Products<O>;
  using V = typename P::Sum;
  constexpr int64_t kSums = kFeatures * kRows, kLanes = V::size();
  static_assert(kSums % kLanes == 0);
  V sum[kSums];
  for (V& s : sum) s = V(C(0));
  const auto step = [&](auto at) __attribute__((always_inline)) {
    typename P::Factor factor[kRows];
#pragma GCC unroll 4
    for (int64_t r = 0; r < kRows; ++r) factor[r] = at(x[r]);
#pragma GCC unroll 16
    for (int64_t f = 0; f < kFeatures; ++f) {
      const auto weight = at(w[f]);
#pragma GCC unroll 4
      for (int64_t r = 0; r < kRows; ++r)
        sum[f * kRows + r] = P::add(weight, factor[r], sum[f * kRows + r]);
    }
  };
  int64_t i = 0;
  for (; i + P::kLength <= k; i += P::kLength)
    step([&](const auto* row) { return P::load(row + i); });
  if constexpr (!whole)
    if (i < k) step([&](const auto* row) { return P::load(row + i, k - i); });
#pragma GCC unroll 4
  for (int64_t s = 0; s < kSums; s += kLanes) {
    V part[kLanes];
#pragma GCC unroll 16
    for (int64_t l = 0; l < kLanes; ++l) part[l] = sum[s + l];
    lane_sums(part).store(sums + s);
  }
}

// out (n, ld) = w x^T, w (n, k) and `rows` rows of x, both with their elements side by side; in
// tiles of kRows rows. Columns behind `rows` hold sums of the last row, or 0.
template <int64_t kRows, typename T, typename O, typename C = compute_t<T>>
void dot_products(int64_t n, int64_t rows, int64_t k, const T* w, int64_t w_ld, const O* x,
                  int64_t x_ld, C* out, int64_t ld) {
  constexpr int64_t kFeatures = kDotSums<C> / kRows;
  std::fill(out, out + n * ld, C(0));
  for (int64_t begin = 0; begin < k; begin += kDotLength) {
    const int64_t length = std::min(k - begin, kDotLength);
    // What each tile asks for of the next features, behind the strip as well. One or two rows do
    // nothing but read, which the processor does better unasked (1 row of 1024-4096: 856 us asked,
    // 707 unasked; 8 rows of 256-1024: 98 and 137).
    const int64_t ahead =
        rows <= 2 ? 0 : round_up(ceil_div(length, ceil_div(rows, kRows)), kLine<T>);
    for (int64_t f = 0; f < n; f += kFeatures) {
      const T* features[kFeatures];
      for (int64_t i = 0; i < kFeatures; ++i)
        features[i] = w + std::min(f + i, n - 1) * w_ld + begin;  // the last one stands in
      for (int64_t r = 0, first = 0; r < rows; r += kRows, first += ahead) {
        for (const T* feature : features)
          prefetch(feature + kFeatures * w_ld + first, std::min(ahead, length - first));
        const O* factors[kRows];
        for (int64_t i = 0; i < kRows; ++i)
          factors[i] = x + std::min(r + i, rows - 1) * x_ld + begin;
        alignas(64) C sums[kFeatures * kRows];
        if (length % Products<O>::kLength == 0)
          dot_tile<true>(features, factors, length, sums);
        else
          dot_tile<false>(features, factors, length, sums);
        for (int64_t i = 0; i < std::min(kFeatures, n - f); ++i)
#pragma omp simd
          for (int64_t j = 0; j < kRows; ++j) out[(f + i) * ld + r + j] += sums[i * kRows + j];
      }
    }
  }
}

// The longest x, in elements, that one row reads again for every feature: 16 KiB, half of L1.
constexpr int64_t kRowLength = 4096;
constexpr int64_t kRowSums = 8;  // vectors of sums, so that additions need not wait for one another

// The sum of w[i] x[i] over k elements, as a vector whose elements are still to be added.
template <typename T, typename O>
typename Products<O>::Sum row_dot(const T* w, const O* x, int64_t k) {
  using P = Products<O>;
  constexpr int64_t kLength = P::kLength;
  auto sum = zeros<typename P::Sum, kRowSums>();
  int64_t i = 0;
  const auto add = [&](int64_t s, int64_t at) __attribute__((always_inline)) {
    sum[s] = P::add(P::load(w + at), P::load(x + at), sum[s]);
  };
  for (; i + kRowSums * kLength <= k; i += kRowSums * kLength)
#pragma GCC unroll 8
    for (int64_t s = 0; s < kRowSums; ++s) add(s, i + s * kLength);
#pragma GCC unroll 8
  for (int64_t s = 0; s < kRowSums - 1; ++s)
    if (i + kLength <= k) {
      add(s, i);
      i += kLength;
    }
  if (const int64_t rest = k - i; rest > 0 && rest < kLength)
    sum[kRowSums - 1] = P::add(P::load(w + i, rest), P::load(x + i, rest), sum[kRowSums - 1]);
#pragma GCC unroll 8
  for (int64_t s = 1; s < kRowSums; ++s) sum[0] = sum[0] + sum[s];
  return sum[0];
}

// out (n, ld) = w x in its first column, one row x of k elements; the others hold 0. Weights
// narrower than what they are multiplied in come from memory twice as fast in one stream as in
// kDotSums of them (Zen 4, two cores, G weights/s: int8 27 and 10, bfloat16 17 and 12; float32 8
// either way).
template <typename T, typename O, typename C = compute_t<T>>
void row_products(int64_t n, int64_t k, const T* w, int64_t w_ld, const O* x, C* out, int64_t ld) {
  using V = typename Products<O>::Sum;
  constexpr int64_t kLanes = V::size();
  std::fill(out, out + n * ld, C(0));
  for (int64_t f = 0; f < n; f += kLanes) {
    V part[kLanes];
    for (int64_t l = 0; l < kLanes; ++l)  // the last feature stands in
      part[l] = row_dot(w + std::min(f + l, n - 1) * w_ld, x, k);
    alignas(64) C sums[kLanes];
    lane_sums(part).store(sums);
    for (int64_t l = 0; l < std::min(kLanes, n - f); ++l) out[(f + l) * ld] = sums[l];
  }
}

constexpr int64_t kTurnedLength = 128;  // sums formed at a time: 32 rows of them stay in L1
// Features of a tile over two vectors of rows, whose sums registers hold.
template <typename C>
constexpr int64_t kTurnedFeatures = sizeof(at::vec::Vectorized<C>) == 32 ? 6 : 12;

// out (n, ld) += w x, w (n, k) with n <= kTurnedFeatures and k <= kTurnedLength, x (k, ld) a right
// operand, ld a multiple of kVectors vectors. The weights are copied, widened to what they
// multiply, to where they lie densely; those of the next features are asked for.
template <int64_t kVectors, typename T, typename O, typename C = compute_t<T>>
void turned_tile(int64_t n, int64_t k, const T* w, int64_t w_ld, const O* x, int64_t ld, C* out) {
  using P = Products<O>;
  using V = typename P::Sum;
  constexpr int64_t kLanes = V::size(), kFeatures = kTurnedFeatures<C>;
  alignas(64) O weights[kFeatures][kTurnedLength];
  const T* features[kFeatures];
  const auto take = [](const T* from, int64_t count, O* to) {
    if constexpr (std::is_same_v<T, O>)
      copy(from, count, to);
    else
      widen(from, count, to);
  };
  for (int64_t f = 0; f < kFeatures; ++f) {
    features[f] = w + std::min(f, n - 1) * w_ld;  // the last one stands in
    if (k == kTurnedLength)                       // nearly always, and then the compiler knows it
      take(features[f], kTurnedLength, weights[f]);
    else
      take(features[f], k, weights[f]);
  }
  for (int64_t column = 0; column < ld; column += kVectors * kLanes) {
    auto sum = zeros<V, kFeatures * kVectors>();
    for (int64_t line = 0; line < k; line += kLine<T>) {
      // a few lines at a time, so that they are on their way while these are multiplied
      if (column == 0)
        for (const T* feature : features) __builtin_prefetch(feature + kFeatures * w_ld + line);
      const int64_t end = std::min(line + kLine<T>, k);
      for (int64_t i = line; i < end; i += kPair<O>) {
        typename P::Factor factor[kVectors];
#pragma GCC unroll 2
        for (int64_t v = 0; v < kVectors; ++v)
          factor[v] = P::load(x + i * ld + kPair<O> * (column + v * kLanes));
#pragma GCC unroll 12
        for (int64_t f = 0; f < kFeatures; ++f) {
          const auto weight = P::repeat(weights[f] + i);
#pragma GCC unroll 2
          for (int64_t v = 0; v < kVectors; ++v)
            sum[f * kVectors + v] = P::add(weight, factor[v], sum[f * kVectors + v]);
        }
      }
    }
    // unrolled: sums that are picked by a number gcc would keep in memory all the time
#pragma GCC unroll 12
    for (int64_t f = 0; f < kFeatures; ++f) {
      if (f >= n) break;
#pragma GCC unroll 2
      for (int64_t v = 0; v < kVectors; ++v) {
        C* place = out + f * ld + column + v * kLanes;
        (V::loadu(place) + sum[f * kVectors + v]).store(place);
      }
    }
  }
}

// out (n, ld) = w x, x (k, ld) turned; ld is a multiple of kVectors vectors.
template <int64_t kVectors, typename T, typename O, typename C = compute_t<T>>
void turned_products(int64_t n, int64_t k, const T* w, int64_t w_ld, const O* x, int64_t ld,
                     C* out) {
  constexpr int64_t kFeatures = kTurnedFeatures<C>;
  std::fill(out, out + n * ld, C(0));
  for (int64_t begin = 0; begin < k; begin += kTurnedLength)
    for (int64_t f = 0; f < n; f += kFeatures)
      turned_tile<kVectors>(std::min(kFeatures, n - f), std::min(kTurnedLength, k - begin),
                            w + f * w_ld + begin, w_ld, x + begin * ld, ld, out + f * ld);
}

// out (n, ld) = w x^T, w (n, k) with its elements side by side, x as few_rows_operand() gave it. ld
// is `rows` rounded up to 16; what the columns behind `rows` hold is finite where x is.
template <typename T, typename O, typename C = compute_t<T>>
void few_rows_product(int64_t n, int64_t rows, int64_t k, const T* w, int64_t w_ld, const O* x,
                      int64_t x_ld, C* out, int64_t ld) {
  constexpr int64_t kLanes = at::vec::Vectorized<C>::size();
  if constexpr (std::is_same_v<O, bf16_t>)
    if (takes_tiles<O>(rows))
      return product(n, ld, k, w, w_ld, x, ld, out, ld, false, longest_sum<O>(ld));
  if constexpr (!std::is_same_v<O, bf16_t> || kPairProducts) {
    if (turns_rows<O>(rows)) {
      if (ld == kLanes)
        turned_products<1>(n, k, w, w_ld, x, ld, out);
      else
        turned_products<2>(n, k, w, w_ld, x, ld, out);
    } else if (rows == 1 && kWidens<T> && k <= kRowLength) {
      row_products(n, k, w, w_ld, x, out, ld);
    } else if (rows == 1) {
      dot_products<1>(n, rows, k, w, w_ld, x, x_ld, out, ld);
    } else if (rows == 2 || kDotSums<C> == 8) {
      dot_products<2>(n, rows, k, w, w_ld, x, x_ld, out, ld);
    } else {
      dot_products<4>(n, rows, k, w, w_ld, x, x_ld, out, ld);
    }
  }
}

// x as the products take it: few rows where they lie, or widened; more turned, (k, ld). Its leading
// dimension in `ld`; `room` has few_rows_operand_room(rows, k) elements.
template <typename T, typename O>
const O* few_rows_operand(const T* x, int64_t rows, int64_t k, O* room, int64_t& ld) {
  if (turns_rows<O>(rows)) {
    const int64_t padded = round_up(rows, 16);
    turn_right(x, ld, rows, k, room, padded, padded);
    ld = padded;
    return room;
  }
  if constexpr (std::is_same_v<T, O>) {
    return x;
  } else {
    for (int64_t r = 0; r < rows; ++r) widen(x + r * ld, k, room + r * k);
    ld = k;
    return room;
  }
}

// Features begin..end - 1 of few rows of y = product + bias, each rounded once; bias may be null.
// product(f, n) leaves features f..f + n - 1 of the product in `room`, (n, rows rounded up to 16).
template <typename T, typename C, typename Product>
void few_rows_strips(int64_t begin, int64_t end, int64_t rows, const T* bias, T* y, int64_t y_ld,
                     const C* room, Product product) {
  for (int64_t f = begin; f < end; f += kFewRowsStrip) {
    const int64_t n = std::min(kFewRowsStrip, end - f);
    product(f, n);
    transpose_narrow(room, round_up(rows, 16), rows, n, bias ? bias + f : nullptr, y + f, y_ld);
  }
}

// The same with x w^T as the product. `room`: few_rows_room(rows).
template <typename T, typename O, typename C = compute_t<T>>
void few_rows_linear(int64_t begin, int64_t end, int64_t rows, int64_t k, const O* x, int64_t x_ld,
                     const T* w, int64_t w_ld, const T* bias, T* y, int64_t y_ld, C* room) {
  few_rows_strips(begin, end, rows, bias, y, y_ld, room, [&](int64_t f, int64_t n) {
    few_rows_product(n, rows, k, w + f * w_ld, w_ld, x, x_ld, room, round_up(rows, 16));
  });
}

}  // namespace
}  // namespace CPU_CAPABILITY
}  // namespace tfm_kernels
