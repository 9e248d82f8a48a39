// What the host halves of the ffn kernels share: the shapes of a call, checked.
#pragma once
#include "activation.h"
#include "rows.h"

namespace tfm_kernels {

struct FfnShape {
  int64_t M, E, F, Eo;

  FfnShape(const at::Tensor& x, const at::Tensor& w1, const OptionalTensor& b1,
           const at::Tensor& w2, const OptionalTensor& gate, int64_t activation, const char* op) {
    check_floating(x, op, "x");
    TORCH_CHECK(x.dim() == 2 && w1.dim() == 2 && w2.dim() == 2, op,
                ": x, w1 and w2 must have 2 dimensions");
    M = x.size(0);
    E = x.size(1);
    F = w1.size(0);
    Eo = w2.size(0);
    check_shape(w1, {F, E}, op, "w1");
    check_shape(w2, {Eo, F}, op, "w2");
    check_shape(gate, {F, E}, op, "gate");
    check_vector(b1, F, x, op, "b1");
    const auto dtype = x.scalar_type();
    TORCH_CHECK(w1.scalar_type() == dtype && w2.scalar_type() == dtype &&
                    (!gate || gate->scalar_type() == dtype),
                op, ": x and the weights must have one dtype");
    TORCH_CHECK(activation >= 0 && activation <= static_cast<int64_t>(Activation::silu), op,
                ": activation must lie in 0..3, got ", activation);
  }
};

// preact as ffn_fwd saves it.
at::Tensor ffn_preact_cpu(const at::Tensor& x, const at::Tensor& w1, const OptionalTensor& b1,
                          const at::Tensor& w2, const OptionalTensor& gate, int64_t activation);

}  // namespace tfm_kernels
