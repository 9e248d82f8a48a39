// Storage types of the CPU kernels and their conversion to the type they compute in: float32, or
// float64 for float64.
#pragma once
#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

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

// The whole vector at p, widened.
template <typename T>
at::vec::Vectorized<compute_t<T>> load_wide(const T* p) {
  if constexpr (kWidens<T>) {
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

// out[i] = in[i], widened; n >= 0.
template <typename T>
void widen(const T* in, int64_t n, compute_t<T>* out) {
  if constexpr (std::is_same_v<T, compute_t<T>>) {
    for (int64_t i = 0; i < n; ++i) out[i] = in[i];
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
    for (int64_t i = 0; i < n; ++i) out[i] = in[i];
  } else {
    using Half2 = at::vec::Vectorized<T>;
    int64_t i = 0;
    for (; i + Half2::size() <= n; i += Half2::size())
      at::vec::convert_from_float<T>(Vec::loadu(in + i), Vec::loadu(in + i + Vec::size()))
          .store(out + i);
    for (; i < n; ++i) out[i] = static_cast<T>(in[i]);
  }
}

// The V (a scalar or a vector) that lies at p.
template <typename V, typename C>
V load(const C* p) {
  if constexpr (std::is_same_v<V, C>)
    return *p;
  else
    return V::loadu(p);
}

// Calls body.template operator()<V>(i) over 0..n-1: whole vectors first, then the rest one by one.
template <typename C, typename Body>
void for_lanes(int64_t n, Body body) {
  using V = at::vec::Vectorized<C>;
  int64_t i = 0;
  for (; i + V::size() <= n; i += V::size()) body.template operator()<V>(i);
  for (; i < n; ++i) body.template operator()<C>(i);
}

template <typename V, typename C>
void store(C* p, V v) {
  if constexpr (std::is_same_v<V, C>)
    *p = v;
  else
    v.store(p);
}

// Zeros in the first n numbers, a multiple of 16, of rows that lie ld apart. (GCC makes of
// std::fill_n here a `rep stos` a row, which takes as long to begin as 500 bytes take to store.)
template <typename C>
void zero_lanes(C* p, int64_t ld, int64_t rows, int64_t n) {
  using V = at::vec::Vectorized<C>;
  for (int64_t r = 0; r < rows; ++r, p += ld)
    for (int64_t i = 0; i < n; i += V::size()) V(C(0)).store(p + i);
}

// The sum of term.template operator()<V>(i) over 0..n-1, in four vector accumulators a block of
// 2048 elements; the blocks are added in double, so that the error does not grow with n.
template <typename C, typename Term>
double sum_lanes(int64_t n, Term term) {
  using V = at::vec::Vectorized<C>;
  constexpr int64_t kStep = 4 * V::size(), kBlock = 2048;
  double total = 0.0;
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    const int64_t end = begin + kBlock < n ? begin + kBlock : n;
    V s0(C(0)), s1(C(0)), s2(C(0)), s3(C(0));
    int64_t i = begin;
    for (; i + kStep <= end; i += kStep) {
      s0 = s0 + term.template operator()<V>(i);
      s1 = s1 + term.template operator()<V>(i + V::size());
      s2 = s2 + term.template operator()<V>(i + 2 * V::size());
      s3 = s3 + term.template operator()<V>(i + 3 * V::size());
    }
    for (; i + V::size() <= end; i += V::size()) s0 = s0 + term.template operator()<V>(i);
    const V s = (s0 + s1) + (s2 + s3);
    double block = at::vec::vec_reduce_all<C>([](const V& a, const V& b) { return a + b; }, s);
    for (; i < end; ++i) block += term.template operator()<C>(i);
    total += block;
  }
  return total;
}

}  // namespace
}  // namespace CPU_CAPABILITY
}  // namespace tfm_kernels
