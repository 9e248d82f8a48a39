// Row views of tensors for the layer_norm kernels' host halves.
#pragma once
#include <ATen/ATen.h>

#include <algorithm>
#include <optional>

#include "vec.h"

namespace tfm_kernels {

inline DType dtype_of(at::ScalarType dtype) {
  return dtype == at::kHalf       ? DType::f16
         : dtype == at::kBFloat16 ? DType::bf16
         : dtype == at::kDouble   ? DType::f64
                                  : DType::f32;
}

// x as (M, N) in `dtype` with unit stride along N, without a copy where its strides allow.
inline at::Tensor as_rows(const at::Tensor& x, at::ScalarType dtype) {
  at::Tensor rows = x.to(dtype).reshape({x.numel() / x.size(-1), x.size(-1)});
  return rows.stride(1) == 1 || rows.size(1) == 1 ? rows : rows.contiguous();
}

inline at::Tensor as_vector(const std::optional<at::Tensor>& t, at::ScalarType dtype) {
  return t ? t->to(dtype).contiguous() : at::Tensor();
}

// Rows a thread should take at least: threads cost a few microseconds, 32768 elements about that.
inline int64_t row_grain(int64_t n) { return std::max<int64_t>(1, 32768 / n); }

}  // namespace tfm_kernels
