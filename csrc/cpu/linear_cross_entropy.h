// What the kernels of linear_cross_entropy share: how logits are summed, and, of the hosts, the
// shapes of a call, checked, and its rows that count.
#pragma once
#include <algorithm>

#include "vec.h"
#include "weights.h"

namespace tfm_kernels {

constexpr double kLog2e = 1.4426950408889634;

inline namespace CPU_CAPABILITY {
namespace {

// The logits (n, ld) of n classes for a panel of ld rows: features of `weight` (n, K) times x^T
// (K, ld), without their bias. (One sum of 1024 products is less exact than a BLAS, and nothing
// else here hides it.)
template <typename T, typename O, typename C = compute_t<T>>
void logits(const T* weight, int64_t n, int64_t K, const O* x_t, int64_t ld, C* z, C* wide) {
  weights_product(n, ld, K, weight, K, x_t, ld, z, ld, false, wide,
                  std::min<int64_t>(256, longest_sum<T>(ld)));
}

}  // namespace
}  // namespace CPU_CAPABILITY

// Elements of working memory that logits() needs of its `wide`.
inline int64_t logits_scratch(int64_t K) { return std::max<int64_t>(32768, 16 * K); }

}  // namespace tfm_kernels

#ifdef CPU_CAPABILITY_DEFAULT
#include <ATen/ops/empty.h>

#include "rows.h"

namespace tfm_kernels {

// The arguments of a call, of the M rows that are not ignored: theirs are the only ones that
// kernels see.
struct CrossEntropyRows {
  int64_t all, M, K, V;
  at::Tensor live;  // the numbers of those rows; undefined where none is ignored
  at::Tensor x, weight, target;
  OptionalTensor bias;
  DType dtype;
  bool bf16_tiles;

  CrossEntropyRows(const at::Tensor& x_, const at::Tensor& weight_, const OptionalTensor& bias_,
                   const at::Tensor& target_, int64_t ignore_index, double label_smoothing,
                   const char* op) {
    check_floating(x_, op, "x");
    TORCH_CHECK(x_.dim() == 2 && weight_.dim() == 2, op, ": x and weight must have 2 dimensions");
    all = x_.size(0);
    K = x_.size(1);
    V = weight_.size(0);
    TORCH_CHECK(V > 0, op, ": weight must have at least one row");
    check_shape(weight_, {V, K}, op, "weight");
    TORCH_CHECK(weight_.scalar_type() == x_.scalar_type(), op, ": weight must have the dtype of x");
    check_vector(bias_, V, x_, op, "bias");
    check_shape(target_, {all}, op, "target");
    TORCH_CHECK(target_.scalar_type() == at::kLong, op, ": target must be int64");
    TORCH_CHECK(label_smoothing >= 0.0 && label_smoothing <= 1.0, op,
                ": label_smoothing must lie in [0, 1], got ", label_smoothing);
    find_live(target_, ignore_index, op);
    x = unit_rows(of_live(x_));
    target = of_live(target_).contiguous();
    weight = weight_.contiguous();
    bias = contiguous(bias_);
    dtype = dtype_of(x.scalar_type());
    bf16_tiles = takes_bf16_tiles(dtype, {K, x.stride(0)});
  }

  void find_live(const at::Tensor& target_, int64_t ignore_index, const char* op) {
    const at::Tensor found = at::empty({all}, target_.options());
    const int64_t* targets = target_.const_data_ptr<int64_t>();
    int64_t* numbers = found.mutable_data_ptr<int64_t>();
    const int64_t stride = target_.stride(0);
    M = 0;
    for (int64_t row = 0; row < all; ++row) {
      const int64_t t = targets[row * stride];
      if (t == ignore_index) continue;
      TORCH_CHECK_INDEX(t >= 0 && t < V, op, ": target must lie in [0, ", V,
                        ") or be ignore_index, got ", t, " in row ", row);
      numbers[M++] = row;
    }
    if (M < all) live = found.narrow(0, 0, M);
  }

  // The rows of a tensor that count.
  at::Tensor of_live(const at::Tensor& t) const {
    return live.defined() ? t.index_select(0, live) : t;
  }

  // What was computed for them, and zeros for the others.
  at::Tensor of_all(const at::Tensor& t) const {
    if (!live.defined()) return t;
    at::DimVector sizes(t.sizes());
    sizes[0] = all;
    at::Tensor result = new_output(sizes, t.options());
    return result.zero_().index_copy_(0, live, t);
  }
};

}  // namespace tfm_kernels
#endif
