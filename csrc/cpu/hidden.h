// What stands between the two products of a feed-forward block, whatever they multiply.
#pragma once
#include "activation.h"
#include "vec.h"

namespace tfm_kernels {
inline namespace CPU_CAPABILITY {
namespace {

// Adds bias[f] to row f of h (n, ld).
template <typename T, typename C>
void add_to_rows(int64_t n, int64_t ld, const T* bias, C* h) {
  for (int64_t f = 0; f < n; ++f) {
    const C shift = static_cast<C>(bias[f]);
#pragma omp simd
    for (int64_t r = 0; r < ld; ++r) h[f * ld + r] += shift;
  }
}

// hidden = act(hidden) over n numbers, times the gate's where there is one.
template <typename C>
void activate(Activation activation, int64_t n, C* hidden, const C* gate) {
  for_activation(activation, [&](auto act) {
#pragma omp simd
    for (int64_t j = 0; j < n; ++j) hidden[j] = act.value(hidden[j]);
  });
  if (gate) {
#pragma omp simd
    for (int64_t j = 0; j < n; ++j) hidden[j] *= gate[j];
  }
}

}  // namespace
}  // namespace CPU_CAPABILITY
}  // namespace tfm_kernels
