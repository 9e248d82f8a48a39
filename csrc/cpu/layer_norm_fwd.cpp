// layer_norm_fwd, CPU. Implements LN.1 to LN.3 of tfm_kernels/ops/layer_norm.py.
// Owns:    one call of the kernel = a range of rows; a row stays in L1 (scratch) while it is read
//          three times.
// Traffic: reads x (and residual), writes y (and z), M*N each; mean and rstd, M each. A sum that is
//          not kept lies in the row of y until y takes its place.
// Limits:  none; float64 computes in float64, everything else in float32.
// Source:  own work.
#include "isa.h"
#include "parameter.h"
#include "philox.h"

namespace tfm_kernels {

struct LayerNormFwd {
  const void *x, *residual;  // (M, N), one dtype; residual may be null
  int64_t x_stride_m, residual_stride_m;
  Parameter weight, bias;
  void *y, *z;        // (M, N) contiguous; z null without a residual, y where it is not kept
  void *mean, *rstd;  // (M) in the compute type; mean null for RMSNorm
  int64_t n;
  double eps, eps_outside;
  bool unbiased;
  bool past_caches;  // how y is stored
  Dropout dropout;
  const int64_t* dropout_rows;  // (M) or null
};

TFM_DECLARE_KERNEL(void layer_norm_fwd(const LayerNormFwd& args, DType dtype, int64_t begin,
                                       int64_t end, void* scratch))

inline namespace CPU_CAPABILITY {
namespace {

constexpr double kFar = 256;  // standard deviations from 0, from where on the mean is corrected

// dropout(x) in `out`; `factors` is room for n numbers.
template <typename T, typename C>
void drop_row(const LayerNormFwd& args, int64_t m, const T* x, C* out, C* factors) {
  const int64_t n = args.n, row = args.dropout_rows ? args.dropout_rows[m] : m;
  dropout_factors(args.dropout.seed, row, 0, n, args.dropout.bound,
                  static_cast<C>(args.dropout.scale), factors);
  widen(x, n, out);
  // a dropped inf or NaN is dropped, not multiplied
  for (int64_t i = 0; i < n; ++i) out[i] = factors[i] == C(0) ? C(0) : out[i] * factors[i];
}

// z = residual + x, rounded to T, which is also what `out` gets where T is narrow; their sum.
template <typename T, typename X, typename C>
double add_row(const LayerNormFwd& args, int64_t m, const X* x, C* out) {
  const T* residual = static_cast<const T*>(args.residual) + m * args.residual_stride_m;
  T* z = static_cast<T*>(args.z) + m * args.n;
  return sum_lanes<T>(args.n, [&]<typename V>(int64_t i) {
    const V v = rounded<T>(load<V>(x + i) + load<V>(residual + i));
    store(z + i, v);
    if constexpr (kWidens<T>) store(out + i, v);
    return v;
  });
}

template <typename T>
void rows(const LayerNormFwd& args, int64_t begin, int64_t end, compute_t<T>* scratch) {
  using C = compute_t<T>;
  const int64_t n = args.n;
  C *row = scratch, *other = scratch + n;
  const C* weight = widened(args.weight, n, scratch + 2 * n);
  const C* bias = widened(args.bias, n, scratch + 3 * n);
  for (int64_t m = begin; m < end; ++m) {
    const T* in = static_cast<const T*>(args.x) + m * args.x_stride_m;
    const C* x = row;  // what is normalised
    double total = 0.0;
    if (args.dropout.active()) {
      drop_row(args, m, in, other, row);
      total = add_row<T>(args, m, other, row);
    } else if (args.residual) {
      total = add_row<T>(args, m, in, row);
    } else if constexpr (kWidens<T>) {
      total = sum_lanes<T>(n, [&]<typename V>(int64_t i) {
        const V v = load<V>(in + i);
        store(row + i, v);
        return v;
      });
    } else {
      x = in;
      if (args.mean) total = sum_lanes<T>(n, [&]<typename V>(int64_t i) { return load<V>(x + i); });
    }
    if constexpr (!kWidens<T>)
      if (args.residual) x = static_cast<const T*>(args.z) + m * n;
    C mu = args.mean ? static_cast<C>(total / static_cast<double>(n)) : C(0);
    const auto centred = [&]<typename V>(int64_t i) { return load<V>(x + i) - V(mu); };
    double squares = sum_lanes<C>(n, [&]<typename V>(int64_t i) {
      const V d = centred.template operator()<V>(i);
      return d * d;
    });
    // numbers far from 0, nearly equal or equal: the rounded mean of a number is not that number,
    // so what is left of it is taken off (LN.2)
    if (args.mean && kFar * kFar * squares < static_cast<double>(n) * mu * mu) {
      const double left = sum_lanes<C>(n, centred);
      squares = std::max(squares - left * left / static_cast<double>(n), 0.0);
      mu = static_cast<C>(mu + left / static_cast<double>(n));
    }
    if (args.mean) static_cast<C*>(args.mean)[m] = mu;
    const double divisor = static_cast<double>(args.unbiased ? n - 1 : n);
    const double root = std::sqrt(squares / divisor + args.eps);
    const C rstd = static_cast<C>(1.0 / (root + args.eps_outside));
    static_cast<C*>(args.rstd)[m] = rstd;

    T* y = static_cast<T*>(args.y) + m * n;
    fill_lanes(y, n, args.past_caches, [&]<typename V>(int64_t i) {
      V v = (load<V>(x + i) - V(mu)) * V(rstd);
      if (weight) v = v * load<V>(weight + i);
      if (bias) v = v + load<V>(bias + i);
      return v;
    });
  }
  if (args.past_caches) streamed();
}

}  // namespace

void layer_norm_fwd(const LayerNormFwd& args, DType dtype, int64_t begin, int64_t end,
                    void* scratch) {
  for_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    rows<T>(args, begin, end, static_cast<compute_t<T>*>(scratch));
  });
}

}  // namespace CPU_CAPABILITY
}  // namespace tfm_kernels

#ifdef CPU_CAPABILITY_DEFAULT
#include <ATen/Parallel.h>
#include <c10/core/ScalarType.h>
#include <torch/library.h>

#include <tuple>

#include "layer_norm.h"
#include "output.h"

namespace tfm_kernels {
namespace {

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> layer_norm_fwd_cpu(
    const at::Tensor& x, const OptionalTensor& residual, const OptionalTensor& weight,
    const OptionalTensor& bias, double eps, double eps_outside, bool rms, bool unbiased,
    double dropout_p, const OptionalTensor& seed, const OptionalTensor& dropout_rows,
    bool keep_sum) {
  constexpr const char* kOp = "layer_norm_fwd_cpu";
  check_floating(x, kOp, "x");
  TORCH_CHECK(x.dim() >= 1 && x.size(-1) >= 1, kOp, ": x must have at least one feature");
  if (residual) check_floating(*residual, kOp, "residual");
  check_shape(residual, x.sizes(), kOp, "residual");
  const int64_t n = x.size(-1), rows = x.numel() / n;
  const auto dtype =
      residual ? c10::promoteTypes(x.scalar_type(), residual->scalar_type()) : x.scalar_type();
  const auto compute = compute_type(dtype);
  const Rows x2(x, dtype), residual2 = residual ? Rows(*residual, dtype) : Rows();
  const Vector w(weight, n, kOp, "weight"), b(bias, n, kOp, "bias");
  const auto options = x.options().dtype(dtype), statistics = x.options().dtype(compute);
  at::Tensor y = new_output(x.sizes(), options);
  at::Tensor z = residual && keep_sum ? new_output(x.sizes(), options) : at::empty({0}, options);
  at::Tensor mean = at::empty({rms ? 0 : rows}, statistics), rstd = at::empty({rows}, statistics);

  LayerNormFwd args{};
  args.x = x2.data;
  args.x_stride_m = x2.stride;
  if (residual) {
    args.residual = residual2.data;
    args.residual_stride_m = residual2.stride;
    args.z = (keep_sum ? z : y).mutable_data_ptr();
    args.dropout = check_dropout(dropout_p, seed, kOp);
    args.dropout_rows = check_rows(dropout_rows, rows, kOp);
  }
  args.weight = w.parameter;
  args.bias = b.parameter;
  args.y = y.mutable_data_ptr();
  args.mean = rms ? nullptr : mean.mutable_data_ptr();
  args.rstd = rstd.mutable_data_ptr();
  args.n = n;
  args.eps = eps;
  args.eps_outside = eps_outside;
  args.unbiased = unbiased;
  args.past_caches = args.z != args.y && goes_past_caches(y);
  at::parallel_for(0, rows, std::max<int64_t>(1, kGrain / n), [&](int64_t begin, int64_t end) {
    WideRows wide(4 * n * rstd.element_size());
    TFM_KERNEL(layer_norm_fwd)(args, dtype_of(dtype), begin, end, wide.data);
  });
  return {y, z, mean, rstd};
}

TORCH_LIBRARY_IMPL(tfm_kernels, CPU, m) { m.impl("layer_norm_fwd_cpu", &layer_norm_fwd_cpu); }

}  // namespace
}  // namespace tfm_kernels
#endif
