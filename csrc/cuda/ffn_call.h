// What the bindings of both directions of ffn check, and the matrices of a call.
#pragma once
#include "binding.h"

namespace tfm_kernels {

// A two-dimensional tensor with unit stride along its rows.
inline Matrix matrix_of(const OptionalTensor& t, const char* op) {
  return Matrix(t, t ? static_cast<int>(t->size(1)) : 1, op);
}

struct FfnCall {
  const char* op;
  int64_t rows, width, hidden, out;  // M, E, F, Eo
  bool gate_biased;                  // b1 (2F,) holds the gate's bias too
  DType type;
  ScalarType storage;

  FfnCall(const char* op, const Tensor& x, const Tensor& w1, const OptionalTensor& b1,
          const Tensor& w2, const OptionalTensor& gate, int64_t activation)
      : op(op) {
    for (const Tensor* t : {&x, &w1, &w2})
      STD_TORCH_CHECK(t->dim() == 2, op, ": ",
                      t == &x    ? "x"
                      : t == &w1 ? "w1"
                                 : "w2",
                      " must have 2 dimensions, got ", t->dim());
    rows = x.size(0), width = x.size(1), hidden = w1.size(0), out = w2.size(0);
    type = dtype_of(x, op, "x");
    storage = x.scalar_type();
    check(x, w1, {hidden, width}, "w1");
    check(x, w2, {out, hidden}, "w2");
    gate_biased = gate && b1 && b1->dim() == 1 && b1->size(0) == 2 * hidden;
    check(x, b1, {gate_biased ? 2 * hidden : hidden}, "b1");
    check(x, gate, {hidden, width}, "gate");
    STD_TORCH_CHECK(0 <= activation && activation <= 3, op, ": activation must lie in 0..3, got ",
                    activation);
    constexpr int64_t kMost = int64_t{1} << 30;
    STD_TORCH_CHECK(width <= kMost && hidden <= kMost && out <= kMost, op,
                    ": w1 and w2 must have at most 2^30 rows and columns");
  }

  // The gate's half of b1; absent where that has none.
  Rows gate_bias(const Matrix& b1) const {
    if (!gate_biased) return {};
    Rows rows = b1.rows;
    rows.data = static_cast<const char*>(rows.data) + hidden * kItemSize[static_cast<int>(type)];
    return rows;
  }

  void check(const Tensor& x, const OptionalTensor& t, Sizes sizes, const char* name) const {
    check_like(t, x, sizes, op, name);
    check_type(t, storage, op, name);
  }
};

}  // namespace tfm_kernels
