// What ffn_bwd does with the hidden activation between its products: FFN.3 and FFN.6.
#pragma once
#include "ffn_bwd.h"
#include "gradient.h"

namespace tfm_kernels {
inline namespace CPU_CAPABILITY {
namespace {

// What a row of a panel holds of preact, or of the gate's product: stored, or just computed;
// rounded either way.
template <typename T, typename C>
void load_preact(const T* stored, const T* bias, int64_t n, C* values) {
  if (!stored) {
    if (bias)
      for (int64_t j = 0; j < n; ++j) values[j] += static_cast<C>(bias[j]);
    if constexpr (std::is_same_v<T, C>) return;
    T rounded[kGradientPanel];
    narrow(values, n, rounded);
    return widen(rounded, n, values);
  }
  widen(stored, n, values);
  for (int64_t j = n; j < kGradientPanel; ++j) values[j] = C(0);
}

// FFN.3 and FFN.6 on kGradientPanel features of a row: from dh, p and g to h (in the place of p),
// dp and dg; g and dg are null without a gate. (Asked for in the loop, a missing dg becomes a
// masked store, which costs AMD's processors more than all the rest.)
template <typename Act, bool kGated, typename C>
void differentiate(const C* factor, const C* dh, C* p, const C* g, C* dp, C* dg) {
#pragma omp simd
  for (int64_t j = 0; j < kGradientPanel; ++j) {
    C slope;
    const C value = Act::value(p[j], slope), scaled = dh[j] * factor[j];
    const C d = factor[j] == C(0) ? C(0) : scaled;
    C linear = C(1);
    if constexpr (kGated) linear = g[j];
    const C h = value * linear * factor[j];
    p[j] = factor[j] == C(0) ? C(0) : h;
    dp[j] = d * linear * slope;
    if constexpr (kGated) dg[j] = d * value;
  }
}

}  // namespace
}  // namespace CPU_CAPABILITY
}  // namespace tfm_kernels
