// Row views of tensors and of parameters for the layer_norm kernels' host halves.
#pragma once
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <optional>

#include "../check.h"
#include "parameter.h"

namespace tfm_kernels {

inline DType dtype_of(at::ScalarType dtype) {
  return dtype == at::kHalf       ? DType::f16
         : dtype == at::kBFloat16 ? DType::bf16
         : dtype == at::kDouble   ? DType::f64
                                  : DType::f32;
}

// What kernels compute in, and keep statistics in.
inline at::ScalarType compute_type(at::ScalarType dtype) {
  return dtype == at::kDouble ? at::kDouble : at::kFloat;
}

// x as M rows of N elements of `dtype` with unit stride along N, copied only where its strides do
// not allow that.
struct Rows {
  at::Tensor owner;
  const void* data = nullptr;
  int64_t stride = 0;

  Rows() = default;
  Rows(const at::Tensor& x, at::ScalarType dtype) : owner(x), stride(x.size(-1)) {
    if (x.scalar_type() != dtype || !x.is_contiguous()) {
      owner = x.to(dtype).reshape({x.numel() / x.size(-1), x.size(-1)});
      if (owner.stride(1) != 1 && owner.size(1) != 1) owner = owner.contiguous();
      stride = owner.stride(0);
    }
    data = owner.const_data_ptr();
  }
};

// Rows of one thread in the compute type: on the stack for the usual lengths.
struct WideRows {
  alignas(64) char stack[65536];
  at::Tensor heap;
  void* data;

  explicit WideRows(int64_t bytes) : data(stack) {
    if (bytes > static_cast<int64_t>(sizeof(stack))) {
      heap = at::empty({bytes}, at::kByte);
      data = heap.mutable_data_ptr();
    }
  }
};

// A weight or bias of n elements, copied only where they do not lie side by side.
struct Vector {
  at::Tensor owner;
  Parameter parameter;

  Vector(const std::optional<at::Tensor>& t, int64_t n, const char* op, const char* name) {
    check_shape(t, {n}, op, name);
    if (!t) return;
    check_floating(*t, op, name);
    owner = t->contiguous();
    parameter = {owner.const_data_ptr(), dtype_of(t->scalar_type())};
  }
};

// Elements that a thread should take at least: threads cost a few microseconds, these about that.
// 64 x 512 took 8.9 us in one part and 7.1 in two, its backward 10.2 and 8.3 (Zen 4).
constexpr int64_t kGrain = 16384;

}  // namespace tfm_kernels
