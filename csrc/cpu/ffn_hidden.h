// What ffn_fwd does with the hidden activation between its two products: FFN.1's bias, FFN.3.
#pragma once
#include "ffn_fwd.h"
#include "hidden.h"
#include "transpose.h"

namespace tfm_kernels {
inline namespace CPU_CAPABILITY {
namespace {

// h (n, ld): adds b1, stores preact, and returns with FFN.3 done. `linear` holds the gate's
// product, which takes its bias, or is null.
template <typename T, typename C = compute_t<T>>
void activate(const FfnFwd& args, int64_t row, int64_t rows, int64_t feature, int64_t n, int64_t ld,
              C* hidden, C* linear) {
  if (args.b1) add_to_rows(n, ld, static_cast<const T*>(args.b1) + feature, hidden);
  if (args.gate_bias) add_to_rows(n, ld, static_cast<const T*>(args.gate_bias) + feature, linear);
  if (args.preact) {
    const int64_t width = linear ? 2 * args.F : args.F;
    T* preact = static_cast<T*>(args.preact) + row * width + feature;
    transpose_narrow<T>(hidden, ld, rows, n, nullptr, preact, width);
    if (linear) transpose_narrow<T>(linear, ld, rows, n, nullptr, preact + args.F, width);
  }
  activate(args.activation, n * ld, hidden, linear);
}

// Zeroes what the rule drops and scales the rest.
template <typename C>
void drop(const Dropout& dropout, const int64_t* rows, int64_t feature, int64_t n, int64_t ld,
          C* hidden) {
  if (dropout.bound > 0xFFFFFFFFu) return std::fill(hidden, hidden + n * ld, C(0));
  const uint32_t bound = static_cast<uint32_t>(dropout.bound);
  const C scale = static_cast<C>(dropout.scale);
  for (int64_t i = 0; i < n; i += 4) {
    const int64_t columns = std::min<int64_t>(4, n - i);
    for (int64_t j = 0; j < ld; j += kPhiloxCounters) {
      alignas(64) uint32_t draws[4][kPhiloxCounters];
      philox_columns(dropout.seed, rows + j, feature + i, draws);
      for (int64_t c = 0; c < columns; ++c) {
        C* h = hidden + (i + c) * ld + j;
#pragma omp simd
        for (int l = 0; l < kPhiloxCounters; ++l) {
          const C kept = h[l] * scale;
          h[l] = draws[c][l] >= bound ? kept : C(0);
        }
      }
    }
  }
}

}  // namespace
}  // namespace CPU_CAPABILITY
}  // namespace tfm_kernels
