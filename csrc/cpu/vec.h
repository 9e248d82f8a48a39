// Storage types of the CPU kernels and their conversion to the type they compute in: float32, or float64 for float64.
#pragma once
#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>

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
      at::vec::convert_from_float<T>(Vec::loadu(in + i), Vec::loadu(in + i + Vec::size())).store(out + i);
    for (; i < n; ++i) out[i] = static_cast<T>(in[i]);
  }
}

}  // namespace
}  // namespace CPU_CAPABILITY
}  // namespace tfm_kernels
