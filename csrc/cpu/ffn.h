// What the host halves of the ffn kernels share: the shapes of a call, checked.
#pragma once
#include "activation.h"
#include "rows.h"

namespace tfm_kernels {

struct FfnShape {
  int64_t M, E, F, Eo;
  bool gate_biased;  // b1 holds the gate's bias behind its own

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
    gate_biased = gate && b1 && b1->dim() == 1 && b1->size(0) == 2 * F;
    check_vector(b1, gate_biased ? 2 * F : F, x, op, "b1");
    const auto dtype = x.scalar_type();
    TORCH_CHECK(w1.scalar_type() == dtype && w2.scalar_type() == dtype &&
                    (!gate || gate->scalar_type() == dtype),
                op, ": x and the weights must have one dtype");
    TORCH_CHECK(activation >= 0 && activation <= static_cast<int64_t>(Activation::silu), op,
                ": activation must lie in 0..3, got ", activation);
  }

  // Where the gate's bias lies, null without one.
  const void* gate_bias(const void* b1, const at::Tensor& x) const {
    return gate_biased ? static_cast<const char*>(b1) + F * x.element_size() : nullptr;
  }
};

// preact as ffn_fwd saves it.
at::Tensor ffn_preact_cpu(const at::Tensor& x, const at::Tensor& w1, const OptionalTensor& b1,
                          const at::Tensor& w2, const OptionalTensor& gate, int64_t activation);

}  // namespace tfm_kernels
