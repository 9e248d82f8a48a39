// attention_step, CPU. Implements tfm_kernels/ops/attention_step.py by the operators linear_fwd and
// attention_fwd, whose kernels do the work: in a decoding step their calls from Python cost as much
// as they do.
// Traffic: theirs. 2*R*E*(N + E) + 4*R*length*E FLOPs; N is E, or 3*E where the cache grows.
// Source:  own work.
#ifdef CPU_CAPABILITY_DEFAULT
#include <torch/library.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "operators.h"

namespace tfm_kernels {
namespace {

// Position `at` of kept (B, H, S, D) = its row and head's part of rows (B, H * D).
void keep_position(const at::Tensor& rows, int64_t at, const at::Tensor& kept) {
  const int64_t batch = kept.size(0), heads = kept.size(1), width = kept.size(3);
  const int64_t size = kept.element_size(), bytes = width * size;
  const char* from = static_cast<const char*>(rows.const_data_ptr());
  char* to = static_cast<char*>(kept.mutable_data_ptr()) + at * kept.stride(2) * size;
  for (int64_t b = 0; b < batch; ++b)
    for (int64_t h = 0; h < heads; ++h)
      std::memcpy(to + (b * kept.stride(0) + h * kept.stride(1)) * size,
                  from + b * rows.stride(0) * size + h * bytes, bytes);
  kept.unsafeGetTensorImpl()->bump_version();
}

at::Tensor attention_step_cpu(const at::Tensor& x, const at::Tensor& in_weight,
                              const OptionalTensor& in_bias, const at::Tensor& out_weight,
                              const OptionalTensor& out_bias, at::Tensor keys, at::Tensor values,
                              int64_t length, bool grows, const OptionalTensor& keep) {
  constexpr const char* kOp = "attention_step_cpu";
  TORCH_CHECK(x.dim() >= 1 && in_weight.dim() == 2 && out_weight.dim() == 2 && keys.dim() == 4, kOp,
              ": x must have rows, the weights 2 dimensions, keys and values 4");
  const int64_t batch = keys.size(0), heads = keys.size(1), size = keys.size(2), d = keys.size(3);
  const int64_t width = heads * d;
  check_shape(values, keys.sizes(), kOp, "values");
  check_shape(in_weight, {3 * width, x.size(-1)}, kOp, "in_weight");
  check_shape(in_bias, {3 * width}, kOp, "in_bias");
  const int64_t out_features = out_weight.size(0);
  check_shape(out_weight, {out_features, width}, kOp, "out_weight");
  check_shape(out_bias, {out_features}, kOp, "out_bias");
  TORCH_CHECK(length >= 1 && length <= size, kOp, ": length must lie in [1, ", size, "], got ",
              length);
  TORCH_CHECK(d >= 1 && keys.stride(3) == 1 && values.stride(3) == 1, kOp,
              ": the elements of a key and of a value must lie side by side");
  for (const auto* kept : {&keys, &values})
    TORCH_CHECK(kept->is_cpu() && kept->scalar_type() == x.scalar_type(), kOp,
                ": keys and values must be CPU tensors of x's dtype");
  const at::Tensor rows = x.reshape({-1, x.size(-1)});
  const int64_t R = rows.size(0);
  TORCH_CHECK(batch >= 1 && R % batch == 0 && (!grows || R == batch), kOp,
              ": x must have a row, or where the cache does not grow several, for each of the ",
              batch, " of keys, got ", R);
  // all that the operators below would refuse, because by then the cache has its new position
  TORCH_CHECK(out_weight.scalar_type() == x.scalar_type() &&
                  (!out_bias || out_bias->scalar_type() == x.scalar_type()),
              kOp, ": out_weight and out_bias must have x's dtype");
  if (keep) {
    const int64_t full[] = {batch, heads, R / batch, length};
    bool fits = keep->is_cpu() && keep->scalar_type() == at::kBool && keep->dim() == 4;
    for (int64_t i = 0; fits && i < 4; ++i) fits = keep->size(i) == 1 || keep->size(i) == full[i];
    TORCH_CHECK(fits, kOp, ": keep must broadcast to (", batch, ", ", heads, ", ", R / batch, ", ",
                length, ") and be a bool CPU tensor, got ", keep->sizes(), " of ",
                keep->scalar_type());
  }

  const int64_t projected = grows ? 3 * width : width;
  const at::Tensor p =
      linear_fwd_cpu(rows, in_weight.narrow(0, 0, projected),
                     in_bias ? OptionalTensor(in_bias->narrow(0, 0, projected)) : std::nullopt);
  if (grows) {
    keep_position(p.narrow(1, width, width), length - 1, keys);
    keep_position(p.narrow(1, 2 * width, width), length - 1, values);
  }
  const at::Tensor query =
      p.narrow(1, 0, width).unflatten(1, {heads, d}).unflatten(0, {batch, R / batch});
  constexpr int64_t kFar = std::numeric_limits<int64_t>::max();
  const at::Tensor out = std::get<0>(attention_fwd_cpu(
      query.transpose(1, 2), keys.narrow(2, 0, length), values.narrow(2, 0, length), std::nullopt,
      keep, std::nullopt, std::nullopt, std::nullopt, R / batch, length, {-kFar, kFar, -kFar, kFar},
      1.0 / std::sqrt(static_cast<double>(d)), 0.0, std::nullopt, true));
  const at::Tensor y =
      linear_fwd_cpu(out.transpose(1, 2).reshape({R, width}), out_weight, out_bias);
  std::vector<int64_t> sizes(x.sizes().begin(), x.sizes().end());
  sizes.back() = out_features;
  return y.view(sizes);
}

TORCH_LIBRARY_IMPL(tfm_kernels, CPU, m) { m.impl("attention_step_cpu", &attention_step_cpu); }

}  // namespace
}  // namespace tfm_kernels
#endif
