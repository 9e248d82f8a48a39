// What the host halves of the ffn kernels share: the shapes of a call, checked, and its working
// memory.
#pragma once
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include "../check.h"
#include "activation.h"
#include "layer_norm.h"
#include "output.h"

namespace tfm_kernels {

inline void check_vector(const OptionalTensor& t, int64_t n, const at::Tensor& x, const char* op,
                         const char* name) {
  check_shape(t, {n}, op, name);
  TORCH_CHECK(!t || t->scalar_type() == x.scalar_type(), op, ": ", name,
              " must have the dtype of x");
}

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

// x itself, or a copy where its columns do not lie side by side.
inline at::Tensor unit_rows(const at::Tensor& x) {
  return x.size(1) <= 1 || x.stride(1) == 1 ? x : x.contiguous();
}

inline OptionalTensor contiguous(const OptionalTensor& t) {
  return t ? OptionalTensor(t->contiguous()) : std::nullopt;
}

inline const void* pointer(const OptionalTensor& t) { return t ? t->const_data_ptr() : nullptr; }

// Two stretches of working memory in the compute type, each begun on a cache line.
struct Workspace {
  at::Tensor owner;
  char *begin, *middle;
  int64_t item;

  Workspace(const at::Tensor& x, int64_t first_elements, int64_t second_elements)
      : item(x.scalar_type() == at::kDouble ? 8 : 4) {
    const int64_t split = (first_elements * item + 63) / 64 * 64;
    owner = at::empty({split + second_elements * item}, x.options().dtype(at::kByte));
    begin = static_cast<char*>(owner.mutable_data_ptr());
    middle = begin + split;
  }
  void* first(int64_t element) const { return begin + element * item; }
  void* second(int64_t element) const { return middle + element * item; }
};

// Calls body(begin, end, worker) for every worker's share of `features`, in multiples of 16.
template <typename Body>
void for_strips(int64_t features, int64_t workers, Body body) {
  const int64_t strips = (features + 15) / 16;
  at::parallel_for(0, workers, 1, [&](int64_t first, int64_t last) {
    for (int64_t worker = first; worker < last; ++worker) {
      const int64_t begin = strips * worker / workers * 16;
      const int64_t end = std::min(features, strips * (worker + 1) / workers * 16);
      if (begin < end) body(begin, end, worker);
    }
  });
}

}  // namespace tfm_kernels
