// Storage types of the CPU kernels and their conversion to the type they compute in: float32, or
// float64 for float64.
#pragma once
#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <type_traits>
#include <utility>

namespace tfm_kernels {

using bf16_t = c10::BFloat16;
using f16_t = c10::Half;

template <typename T>
using compute_t = std::conditional_t<std::is_same_v<T, double>, double, float>;

enum class DType { f32, f16, bf16, f64 };

// Calls `body` with a value of the storage type that `dtype` names.
template <typename Body>
decltype(auto) for_dtype(DType dtype, Body&& body) {
  switch (dtype) {
    case DType::f16:
      return body(f16_t{});
    case DType::bf16:
      return body(bf16_t{});
    case DType::f64:
      return body(double{});
    default:
      return body(float{});
  }
}

inline namespace CPU_CAPABILITY {
namespace {

using Vec = at::vec::Vectorized<float>;

template <typename T>
constexpr bool kWidens = !std::is_same_v<T, compute_t<T>>;

// 8-bit integers, such as weights may be stored in, widen to float32 as 16-bit numbers do.
inline Vec widened(const int8_t* p) {
#if defined(CPU_CAPABILITY_AVX512)
  const auto whole = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(whole));
#elif defined(CPU_CAPABILITY_AVX2)
  const auto whole = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(whole));
#else
  float wide[Vec::size()];
  std::copy_n(p, Vec::size(), wide);
  return Vec::loadu(wide);
#endif
}

// The whole vector at p, widened.
template <typename T>
at::vec::Vectorized<compute_t<T>> load_wide(const T* p) {
  if constexpr (std::is_same_v<T, int8_t>) {
    return widened(p);
  } else if constexpr (kWidens<T>) {
    Vec wide;
    if constexpr (std::is_same_v<T, bf16_t>)
      at::vec::load_fp32_from_bf16(p, wide);
    else
      at::vec::load_fp32_from_fp16(p, wide);
    return wide;
  } else {
    return at::vec::Vectorized<T>::loadu(p);
  }
}

// The first n elements at p, widened; the others are 0.
template <typename T>
at::vec::Vectorized<compute_t<T>> load_wide(const T* p, int64_t n) {
  if constexpr (kWidens<T>) {
    T whole[Vec::size()] = {};
    std::copy_n(p, n, whole);
    return load_wide(whole);
  } else {
    return at::vec::Vectorized<T>::loadu(p, static_cast<int>(n));
  }
}

// out[i] = in[i]; n >= 0. By vectors, because gcc makes `rep movs` of a short copy by elements,
// which takes as long to begin as 100 multiplications of vectors.
template <typename C>
void copy(const C* in, int64_t n, C* out) {
  using V = at::vec::Vectorized<C>;
  int64_t i = 0;
  for (; i + V::size() <= n; i += V::size()) V::loadu(in + i).store(out + i);
  for (; i < n; ++i) out[i] = in[i];
}

// out[i] = in[i], widened; n >= 0.
template <typename T>
void widen(const T* in, int64_t n, compute_t<T>* out) {
  if constexpr (std::is_same_v<T, compute_t<T>>) {
    copy(in, n, out);
  } else if constexpr (std::is_same_v<T, int8_t>) {
    int64_t i = 0;
    for (; i + Vec::size() <= n; i += Vec::size()) widened(in + i).store(out + i);
    for (; i < n; ++i) out[i] = in[i];
  } else {
    using Half2 = at::vec::Vectorized<T>;
    int64_t i = 0;
    for (; i + Half2::size() <= n; i += Half2::size()) {
      auto [low, high] = at::vec::convert_to_float<T>(Half2::loadu(in + i));
      low.store(out + i);
      high.store(out + i + Vec::size());
    }
    for (; i < n; ++i) out[i] = static_cast<float>(in[i]);
  }
}

// out[i] = in[i], rounded once to nearest even; n >= 0.
template <typename T>
void narrow(const compute_t<T>* in, int64_t n, T* out) {
  if constexpr (std::is_same_v<T, compute_t<T>>) {
    copy(in, n, out);
  } else {
    using Half2 = at::vec::Vectorized<T>;
    int64_t i = 0;
    for (; i + Half2::size() <= n; i += Half2::size())
      at::vec::convert_from_float<T>(Vec::loadu(in + i), Vec::loadu(in + i + Vec::size()))
          .store(out + i);
    for (; i < n; ++i) out[i] = static_cast<T>(in[i]);
  }
}

// Two vectors rounded once, to nearest even, as what the processor's own products of bfloat16 read,
// which take numbers below 2^-126 for 0. Only where it has such products. (By its name, because
// this file is also compiled for processors that do not have the instruction; what narrow() does
// instead takes 15.)
inline at::vec::Vectorized<bf16_t> operands(const Vec& low, const Vec& high) {
#if defined(CPU_CAPABILITY_AVX512)
  __m512i both;
  asm("vcvtne2ps2bf16 %1, %2, %0"
      : "=v"(both)
      : "v"(static_cast<__m512>(low)), "v"(static_cast<__m512>(high)));
  return both;
#else
  return at::vec::convert_from_float<bf16_t>(low, high);
#endif
}

// The numbers that one vector of 16-bit ones widens to.
struct TwoVecs {
  Vec low, high;

  TwoVecs() = default;
  explicit TwoVecs(float x) : low(x), high(x) {}
  TwoVecs(Vec low, Vec high) : low(low), high(high) {}
};

inline TwoVecs operator+(const TwoVecs& a, const TwoVecs& b) {
  return {a.low + b.low, a.high + b.high};
}
inline TwoVecs operator-(const TwoVecs& a, const TwoVecs& b) {
  return {a.low - b.low, a.high - b.high};
}
inline TwoVecs operator*(const TwoVecs& a, const TwoVecs& b) {
  return {a.low * b.low, a.high * b.high};
}

// What a vector of T is computed in.
template <typename T>
using lanes_t = std::conditional_t<kWidens<T>, TwoVecs, at::vec::Vectorized<compute_t<T>>>;

// The V (a scalar or vectors of the compute type) that lies at p, widened where E is narrow.
template <typename V, typename E>
V load(const E* p) {
  if constexpr (std::is_arithmetic_v<V>) {
    return static_cast<V>(*p);
  } else if constexpr (!std::is_same_v<V, TwoVecs>) {
    return V::loadu(p);
  } else if constexpr (kWidens<E>) {
    const auto [low, high] = at::vec::convert_to_float<E>(at::vec::Vectorized<E>::loadu(p));
    return {low, high};
  } else {
    return {Vec::loadu(p), Vec::loadu(p + Vec::size())};
  }
}

// Rounded once, to nearest even, where E is narrow.
template <typename V, typename E>
void store(E* p, const V& v) {
  if constexpr (std::is_arithmetic_v<V>) {
    *p = static_cast<E>(v);
  } else if constexpr (!std::is_same_v<V, TwoVecs>) {
    v.store(p);
  } else if constexpr (kWidens<E>) {
    at::vec::convert_from_float<E>(v.low, v.high).store(p);
  } else {
    v.low.store(p);
    v.high.store(p + Vec::size());
  }
}

// Likewise, for whole vectors past the caches, which else read first what is overwritten; such a
// vector lies on a multiple of its size. Other threads see it after streamed().
template <typename V, typename E>
void stream(E* p, const V& v) {
#if defined(CPU_CAPABILITY_AVX512) || defined(CPU_CAPABILITY_AVX2)
  if constexpr (std::is_arithmetic_v<V>) {
    store(p, v);
  } else if constexpr (std::is_same_v<V, TwoVecs>) {
    stream(p, at::vec::convert_from_float<E>(v.low, v.high));
  } else {
#ifdef CPU_CAPABILITY_AVX512
    _mm512_stream_si512(reinterpret_cast<__m512i*>(p), std::bit_cast<__m512i>(v));
#else
    _mm256_stream_si256(reinterpret_cast<__m256i*>(p), std::bit_cast<__m256i>(v));
#endif
  }
#else
  store(p, v);
#endif
}

inline void streamed() {
#if defined(CPU_CAPABILITY_AVX512) || defined(CPU_CAPABILITY_AVX2)
  _mm_sfence();
#endif
}

// v as it is once it has been stored as a T.
template <typename T, typename V>
V rounded(const V& v) {
  if constexpr (!kWidens<T>) {
    return v;
  } else if constexpr (std::is_arithmetic_v<V>) {
    return static_cast<V>(static_cast<T>(v));
  } else {
    const auto [low, high] =
        at::vec::convert_to_float<T>(at::vec::convert_from_float<T>(v.low, v.high));
    return {low, high};
  }
}

// Calls body.template operator()<V>(i) over 0..n-1: by whole vectors of T first, then one by one.
template <typename T, typename Body>
void for_lanes(int64_t n, Body body) {
  constexpr int64_t kWidth = at::vec::Vectorized<T>::size();
  int64_t i = 0;
  for (; i + kWidth <= n; i += kWidth) body.template operator()<lanes_t<T>>(i);
  for (; i < n; ++i) body.template operator()<compute_t<T>>(i);
}

// out[i] = value.template operator()<V>(i), over 0..n-1, likewise; past the caches if so wished.
template <typename T, typename Value>
void fill_lanes(T* out, int64_t n, bool past_caches, Value value) {
  if (past_caches)
    for_lanes<T>(n,
                 [&]<typename V>(int64_t i) { stream(out + i, value.template operator()<V>(i)); });
  else
    for_lanes<T>(n,
                 [&]<typename V>(int64_t i) { store(out + i, value.template operator()<V>(i)); });
}

// Zeros in the first n numbers, a multiple of 16, of rows that lie ld apart. (GCC makes of
// std::fill_n here a `rep stos` a row, which takes as long to begin as 500 bytes take to store.)
template <typename C>
void zero_lanes(C* p, int64_t ld, int64_t rows, int64_t n) {
  using V = at::vec::Vectorized<C>;
  for (int64_t r = 0; r < rows; ++r, p += ld)
    for (int64_t i = 0; i < n; i += V::size()) V(C(0)).store(p + i);
}

// The sums of the K numbers of term.template operator()<V>(i), a std::array<V, K>, over 0..n-1, by
// whole vectors of T first, then one by one. Several vector accumulators a block of 2048 elements;
// the blocks are added in double, so that the error does not grow with n.
template <typename T, size_t K, typename Term>
std::array<double, K> sums_lanes(int64_t n, Term term) {
  using C = compute_t<T>;
  using V = at::vec::Vectorized<C>;
  using W = lanes_t<T>;
  constexpr int64_t kWidth = at::vec::Vectorized<T>::size(), kBlock = 2048;
  constexpr int kChains = kWidens<T> || K > 1 ? 2 : 4;
  std::array<double, K> totals{};
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    const int64_t end = begin + kBlock < n ? begin + kBlock : n;
    W sum[K][kChains];
    for (auto& chains : sum) std::fill_n(chains, kChains, W(C(0)));
    int64_t i = begin;
    for (; i + kChains * kWidth <= end; i += kChains * kWidth) {
#pragma GCC unroll 4
      for (int c = 0; c < kChains; ++c) {
        const std::array<W, K> found = term.template operator()<W>(i + c * kWidth);
        for (size_t k = 0; k < K; ++k) sum[k][c] = sum[k][c] + found[k];
      }
    }
    for (; i + kWidth <= end; i += kWidth) {
      const std::array<W, K> found = term.template operator()<W>(i);
      for (size_t k = 0; k < K; ++k) sum[k][0] = sum[k][0] + found[k];
    }
    for (size_t k = 0; k < K; ++k) {
      W all = sum[k][0] + sum[k][1];
      if constexpr (kChains == 4) all = all + (sum[k][2] + sum[k][3]);
      V one;
      if constexpr (kWidens<T>)
        one = all.low + all.high;
      else
        one = all;
      totals[k] += at::vec::vec_reduce_all<C>([](const V& a, const V& b) { return a + b; }, one);
    }
    for (; i < end; ++i) {
      const std::array<C, K> found = term.template operator()<C>(i);
      for (size_t k = 0; k < K; ++k) totals[k] += found[k];
    }
  }
  return totals;
}

// The sum of term.template operator()<V>(i), likewise.
template <typename T, typename Term>
double sum_lanes(int64_t n, Term term) {
  return sums_lanes<T, 1>(n, [&]<typename V>(int64_t i) {
    return std::array<V, 1>{term.template operator()<V>(i)};
  })[0];
}

// n vectors of zeros, written out: an array that a loop fills (`V v[n];` calls constructors in one)
// gcc keeps in memory, and stores it in every turn of the loops that add to it.
template <typename V, size_t n>
[[gnu::always_inline]] inline std::array<V, n> zeros() {
  return []<size_t... i>(std::index_sequence<i...>) {
    return std::array<V, n>{(static_cast<void>(i), V(0))...};
  }(std::make_index_sequence<n>{});
}

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

}  // namespace
}  // namespace CPU_CAPABILITY
}  // namespace tfm_kernels
