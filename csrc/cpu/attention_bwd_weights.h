// The softmax of the backward: weights from scores and lse, transposed, and the gradient of the
// scores.
#pragma once
#include <algorithm>
#include <limits>

#include "attention_bwd.h"
#include "softmax.h"

namespace tfm_kernels {
inline namespace CPU_CAPABILITY {
namespace {

// What a panel of queries meets of a tile of keys.
struct Part {
  int64_t rows = 0, lanes = 0;    // the panel's rows; the same or a few more: a multiple of 16
  int64_t begin = 0, column = 0;  // the first column, counted within the tile and of all
  int64_t width = 0, padded_width = 0;  // columns that some row sees; as many as are computed
  bool full = false;                    // every row that sees anything sees all of them
};

// A.3 of V::size() rows, i.. in panel order, for one key after another.
template <typename C, bool kMasked, bool kExtras>
struct Weights {
  using V = at::vec::Vectorized<C>;
  // lse in units of log2 unless there are extras; first and end count from the part's first
  // column
  static constexpr C kUnit = kExtras ? C(1) : static_cast<C>(kLog2E);
  V step, shift, first, end, column{C(0)};

  template <typename O>
  Weights(const AttentionBwdScratch<C, O>& mem, const Part& part, double scale, int64_t i)
      : step(static_cast<C>(scale) * kUnit), shift(V::loadu(mem.lse + i) * V(kUnit)) {
    if constexpr (kMasked) {
      alignas(64) C bounds[2][V::size()];
      for (int64_t l = 0; l < V::size(); ++l) {
        bounds[0][l] =
            static_cast<C>(std::clamp<int64_t>(mem.begins[i + l] - part.column, 0, part.width));
        bounds[1][l] =
            static_cast<C>(std::clamp<int64_t>(mem.ends[i + l] - part.column, 0, part.width));
      }
      first = V::loadu(bounds[0]);
      end = V::loadu(bounds[1]);
    }
  }

  V next(V x, V extra) {
    if constexpr (kExtras)
      x = (x * step + extra - shift) * V(static_cast<C>(kLog2E));
    else
      x = at::vec::fmsub(x, step, shift);
    const V zero(C(0));
    V result = exp2_fast(at::vec::clamp_max(x, zero));
    if constexpr (kMasked) {
      result = V::blendv(zero, result, (column >= first) & (column < end));
      column = column + V(C(1));
    }
    if constexpr (kExtras)
      result = V::blendv(result, zero, extra == V(-std::numeric_limits<C>::infinity()));
    return result;
  }
};

// A.3, A.6, A.7: scores in p and dout v^T in dx become (p f)^T but for dropout's scale, and dx^T.
template <bool kMasked, bool kExtras, typename C, typename O>
void weights(const AttentionBwdScratch<C, O>& mem, const Part& part, double scale, int64_t i) {
  using V = at::vec::Vectorized<C>;
  for (int64_t l = 0; l < part.lanes; l += V::size()) {
    Weights<C, kMasked, kExtras> at(mem, part, scale, i + l);
    const V less = V::loadu(mem.delta + i + l), to_one = V::loadu(mem.norm + i + l);
    for (int64_t j = l; j < l + part.padded_width * kPanel; j += kPanel) {
      const V x = V::loadu(mem.p + j), product = V::loadu(mem.dx + j);
      if constexpr (kExtras) {
        const V w = to_one * at.next(x, V::loadu(mem.extras_t + j)),
                f = V::loadu(mem.factors_t + j);
        (w * at::vec::clamp_max(f, V(C(1)))).store(mem.p + j);
        (w * at::vec::fmsub(product, f, less)).store(mem.dx + j);
      } else {
        const V w = at.next(x, x);
        w.store(mem.p + j);
        (w * (product - less)).store(mem.dx + j);
      }
    }
  }
}

}  // namespace
}  // namespace CPU_CAPABILITY
}  // namespace tfm_kernels
