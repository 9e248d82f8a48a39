// Host checks shared by the kernels' entry points. The public functions have checked before with
// better words; these keep a direct call of torch.ops.tfm_kernels.* from reading outside its
// buffers.
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <cmath>
#include <initializer_list>
#include <optional>

#include "cpu/philox.h"

namespace tfm_kernels {

using OptionalTensor = std::optional<at::Tensor>;

inline void check_shape(const at::Tensor& t, at::IntArrayRef sizes, const char* op,
                        const char* name) {
  TORCH_CHECK(t.sizes() == sizes, op, ": ", name, " must have shape ", sizes, ", got ", t.sizes());
}

inline void check_shape(const OptionalTensor& t, at::IntArrayRef sizes, const char* op,
                        const char* name) {
  if (t) check_shape(*t, sizes, op, name);
}

inline void check_floating(const at::Tensor& t, const char* op, const char* name) {
  const auto type = t.scalar_type();
  TORCH_CHECK(
      type == at::kFloat || type == at::kBFloat16 || type == at::kHalf || type == at::kDouble, op,
      ": ", name, " must be float16, bfloat16, float32 or float64, got ", type);
}

// The dropout rule of a call; inactive where p is 0.
inline Dropout check_dropout(double p, const OptionalTensor& seed, const char* op) {
  TORCH_CHECK(p >= 0.0 && p <= 1.0, op, ": dropout_p must lie in [0, 1], got ", p);
  Dropout dropout;
  if (p > 0.0) {
    TORCH_CHECK(seed && seed->numel() == 1 && seed->scalar_type() == at::kLong, op,
                ": seed must be an int64 tensor of one element where dropout_p > 0");
    dropout.seed = static_cast<uint64_t>(seed->item<int64_t>());
    dropout.bound = static_cast<uint64_t>(std::ceil(p * 4294967296.0));
    dropout.scale = p < 1.0 ? 1.0 / (1.0 - p) : 0.0;
  }
  return dropout;
}

// Row numbers for the dropout counter: null where rows count up from 0.
inline const int64_t* check_rows(const OptionalTensor& rows, int64_t count, const char* op) {
  if (!rows) return nullptr;
  TORCH_CHECK(rows->scalar_type() == at::kLong && rows->is_contiguous() && rows->numel() == count,
              op, ": dropout_rows must be a contiguous int64 tensor of ", count, " elements");
  return rows->const_data_ptr<int64_t>();
}

}  // namespace tfm_kernels
