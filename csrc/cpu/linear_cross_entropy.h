// What the kernels of linear_cross_entropy share: how logits are summed, and, of the hosts, the
// shapes of a call, checked, and its rows that count.
#pragma once
#include "weights.h"

namespace tfm_kernels {

inline namespace CPU_CAPABILITY {
namespace {

// The logits (n, ld) of n classes for a panel of ld rows: features of `weight` (n, K) times x^T
// (K, ld), without their bias.
template <typename T, typename O, typename C = compute_t<T>>
void logits(const T* weight, int64_t n, int64_t K, const O* x_t, int64_t ld, C* z, C* wide) {
  weights_product(n, ld, K, weight, K, x_t, ld, z, ld, false, wide, longest_bare_sum<T>(ld));
}

}  // namespace
}  // namespace CPU_CAPABILITY

}  // namespace tfm_kernels

#ifdef CPU_CAPABILITY_DEFAULT
#include <ATen/ops/empty.h>

#include "rows.h"

namespace tfm_kernels {

// A call's sizes, checked, and which of its rows count: M that are not ignored.
struct CrossEntropyCall {
  int64_t all, M, K, V;
  at::Tensor live;  // the numbers of those rows; undefined where none is ignored

  CrossEntropyCall(const at::Tensor& x, const at::Tensor& weight, const OptionalTensor& bias,
                   const at::Tensor& target, int64_t ignore_index, double label_smoothing,
                   const char* op) {
    check_floating(x, op, "x");
    TORCH_CHECK(x.dim() == 2 && weight.dim() == 2, op, ": x and weight must have 2 dimensions");
    all = x.size(0);
    K = x.size(1);
    V = weight.size(0);
    TORCH_CHECK(V > 0, op, ": weight must have at least one row");
    check_shape(weight, {V, K}, op, "weight");
    TORCH_CHECK(weight.scalar_type() == x.scalar_type(), op, ": weight must have the dtype of x");
    check_vector(bias, V, x, op, "bias");
    check_shape(target, {all}, op, "target");
    TORCH_CHECK(target.scalar_type() == at::kLong, op, ": target must be int64");
    TORCH_CHECK(label_smoothing >= 0.0 && label_smoothing <= 1.0, op,
                ": label_smoothing must lie in [0, 1], got ", label_smoothing);
    find_live(target, ignore_index, op);
  }

  void find_live(const at::Tensor& target, int64_t ignore_index, const char* op) {
    const at::Tensor found = at::empty({all}, target.options());
    const int64_t* targets = target.const_data_ptr<int64_t>();
    int64_t* numbers = found.mutable_data_ptr<int64_t>();
    const int64_t stride = target.stride(0);
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

// Those rows as kernels take them.
struct CrossEntropyRows : CrossEntropyCall {
  at::Tensor x, weight, target;
  OptionalTensor bias;
  DType dtype;
  bool bf16_tiles;

  CrossEntropyRows(const CrossEntropyCall& call, const at::Tensor& x, const at::Tensor& weight,
                   const OptionalTensor& bias, const at::Tensor& target)
      : CrossEntropyCall(call),
        x(unit_rows(of_live(x))),
        weight(weight.contiguous()),
        target(of_live(target).contiguous()),
        bias(contiguous(bias)),
        dtype(dtype_of(x.scalar_type())),
        bf16_tiles(takes_bf16_tiles(dtype, {K, this->x.stride(0)})) {}
};

}  // namespace tfm_kernels
#endif
