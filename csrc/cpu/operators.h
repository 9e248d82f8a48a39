// Operators that others are made of, to be called past the dispatcher.
#pragma once
#include <ATen/core/Tensor.h>

#include <tuple>

#include "../check.h"

namespace tfm_kernels {

at::Tensor linear_fwd_cpu(const at::Tensor& x, const at::Tensor& weight,
                          const OptionalTensor& bias);

at::Tensor int8_linear_fwd_cpu(const at::Tensor& x, const at::Tensor& weight,
                               const at::Tensor& scale, const OptionalTensor& bias, bool dynamic);

std::tuple<at::Tensor, at::Tensor> attention_fwd_cpu(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const OptionalTensor& bias, const OptionalTensor& keep, const OptionalTensor& key_lengths,
    const OptionalTensor& cu_seqlens_q, const OptionalTensor& cu_seqlens_k, int64_t max_seqlen_q,
    int64_t max_seqlen_k, at::IntArrayRef window, double scale, double dropout_p,
    const OptionalTensor& seed, bool deterministic);

}  // namespace tfm_kernels
