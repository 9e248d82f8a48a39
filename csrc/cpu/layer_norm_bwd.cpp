// layer_norm_bwd, CPU. Implements LN.4 to LN.6 of tfm_kernels/ops/layer_norm.py.
// Owns:    one call of the kernel = a block of rows and one row each of partial dweight and dbias,
//          which the join adds up and rounds to the parameters' types; blocks depend on M and N
//          alone, never on the number of threads, so the sums are repeatable on every machine.
// Traffic: reads dy, z (and dz), writes dx (and dresidual, which differs from dx only under
//          dropout), M*N each.
// Limits:  none; float64 computes in float64, everything else in float32.
// Source:  own work.
#include "isa.h"
#include "parameter.h"
#include "philox.h"

namespace tfm_kernels {

struct LayerNormBwd {
  const void *dy, *dz, *z;  // (M, N), one dtype; dz may be null
  int64_t dy_stride_m, dz_stride_m, z_stride_m;
  const void *mean, *rstd;  // (M) in the compute type; mean null for RMSNorm
  Parameter weight;
  void *dx, *dresidual;  // (M, N) contiguous; dresidual null where dx serves for both
  ParameterGradient dweight, dbias;
  void* sums;  // (blocks, 2, N) in the compute type, what each block adds up for them
  int64_t rows, n, block, blocks;
  double eps_outside;
  bool unbiased;
  bool past_caches;  // how the sum's gradient is stored: dresidual, or dx which serves for both
  Dropout dropout;
  const int64_t* dropout_rows;
};

TFM_DECLARE_KERNEL(void layer_norm_bwd(const LayerNormBwd& args, DType dtype, int64_t block,
                                       void* scratch);
                   void layer_norm_bwd_join(const LayerNormBwd& args, DType dtype))

inline namespace CPU_CAPABILITY {
namespace {

template <typename T>
void rows(const LayerNormBwd& args, int64_t block, compute_t<T>* scratch) {
  using C = compute_t<T>;
  // xhat is kept only where z would be widened twice: a store costs more than computing it again. g
  // is kept always: computed again it might be fused with what is taken from it, and where N is 1
  // nothing but its rounding would be left.
  constexpr bool kKept = kWidens<T>;
  const int64_t n = args.n;
  const int64_t begin = block * args.block, end = std::min(begin + args.block, args.rows);
  C *g = scratch, *xhat = scratch + n, *factors = scratch + 2 * n;
  const C* weight = widened(args.weight, n, scratch + 3 * n);
  C* sums = static_cast<C*>(args.sums) + 2 * n * block;
  C* dweight = args.dweight.data ? sums : nullptr;
  C* dbias = args.dbias.data ? sums + n : nullptr;
  if (dweight) std::fill(dweight, dweight + n, C(0));
  if (dbias) std::fill(dbias, dbias + n, C(0));
  for (int64_t m = begin; m < end; ++m) {
    const T* dy = static_cast<const T*>(args.dy) + m * args.dy_stride_m;
    const T* z = static_cast<const T*>(args.z) + m * args.z_stride_m;
    const T* dz = args.dz ? static_cast<const T*>(args.dz) + m * args.dz_stride_m : nullptr;
    const C mean = args.mean ? static_cast<const C*>(args.mean)[m] : C(0);
    const C rstd = static_cast<const C*>(args.rstd)[m];
    const auto [dot, sum] = sums_lanes<T, 2>(n, [&]<typename V>(int64_t i) {
      const V x = (load<V>(z + i) - V(mean)) * V(rstd);
      V d = load<V>(dy + i);
      if (dweight) store(dweight + i, load<V>(dweight + i) + d * x);
      if (dbias) store(dbias + i, load<V>(dbias + i) + d);
      if (weight) d = d * load<V>(weight + i);
      if constexpr (kKept) store(xhat + i, x);
      store(g + i, d);
      return std::array<V, 2>{d * x, d};
    });
    const double degrees = static_cast<double>(args.unbiased ? n - 1 : n);
    const double share = 1.0 - args.eps_outside * rstd;  // of the root in 1 / rstd
    const C along = share > 0.0 ? static_cast<C>(dot / (degrees * share)) : C(0);
    const C offset = args.mean ? static_cast<C>(sum / static_cast<double>(n)) : C(0);
    T* dx = static_cast<T*>(args.dx) + m * n;
    T* out = args.dresidual ? static_cast<T*>(args.dresidual) + m * n : dx;
    fill_lanes(out, n, args.past_caches, [&]<typename V>(int64_t i) {
      V x;
      if constexpr (kKept)
        x = load<V>(xhat + i);
      else
        x = (load<V>(z + i) - V(mean)) * V(rstd);
      V d = V(rstd) * (load<V>(g + i) - V(offset) - x * V(along));
      if (dz) d = d + load<V>(dz + i);
      if (args.dresidual) store(g + i, d);
      return d;
    });
    if (!args.dresidual) continue;
    const int64_t row = args.dropout_rows ? args.dropout_rows[m] : m;
    dropout_factors(args.dropout.seed, row, 0, n, args.dropout.bound,
                    static_cast<C>(args.dropout.scale), factors);
    for (int64_t i = 0; i < n; ++i) g[i] = factors[i] == C(0) ? C(0) : g[i] * factors[i];
    narrow(g, n, dx);
  }
  if (args.past_caches) streamed();
}

// What all blocks have summed from `sums` on, added up and rounded once.
template <typename C>
void join(const LayerNormBwd& args, const C* sums, const ParameterGradient& gradient) {
  if (!gradient.data) return;
  for_dtype(gradient.type, [&](auto zero) {
    using P = decltype(zero);
    P* out = static_cast<P*>(gradient.data);
    const auto add = [&]<typename V>(int64_t i) {
      V all = load<V>(sums + i);
      for (int64_t block = 1; block < args.blocks; ++block)
        all = all + load<V>(sums + 2 * args.n * block + i);
      store(out + i, all);
    };
    if constexpr (std::is_same_v<compute_t<P>, C>)
      for_lanes<P>(args.n, add);
    else
      for (int64_t i = 0; i < args.n; ++i) add.template operator()<C>(i);
  });
}

template <typename C>
void join(const LayerNormBwd& args) {
  const C* sums = static_cast<const C*>(args.sums);
  join(args, sums, args.dweight);
  join(args, sums + args.n, args.dbias);
}

}  // namespace

void layer_norm_bwd(const LayerNormBwd& args, DType dtype, int64_t block, void* scratch) {
  for_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    rows<T>(args, block, static_cast<compute_t<T>*>(scratch));
  });
}

void layer_norm_bwd_join(const LayerNormBwd& args, DType dtype) {
  dtype == DType::f64 ? join<double>(args) : join<float>(args);
}

}  // namespace CPU_CAPABILITY
}  // namespace tfm_kernels

#ifdef CPU_CAPABILITY_DEFAULT
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <tuple>

#include "layer_norm.h"
#include "output.h"

namespace tfm_kernels {
namespace {

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> layer_norm_bwd_cpu(
    const at::Tensor& dy, const OptionalTensor& dz, const at::Tensor& z, const at::Tensor& mean,
    const at::Tensor& rstd, const OptionalTensor& weight, const OptionalTensor& bias,
    double eps_outside, bool rms, bool unbiased, double dropout_p, const OptionalTensor& seed,
    const OptionalTensor& dropout_rows, bool need_weight, bool need_bias) {
  constexpr const char* kOp = "layer_norm_bwd_cpu";
  check_floating(z, kOp, "z");
  TORCH_CHECK(z.dim() >= 1 && z.size(-1) >= 1, kOp, ": z must have at least one feature");
  const int64_t n = z.size(-1), rows = z.numel() / n;
  check_shape(dy, z.sizes(), kOp, "dy");
  check_shape(dz, z.sizes(), kOp, "dz");
  check_shape(mean, {rms ? 0 : rows}, kOp, "mean");
  check_shape(rstd, {rows}, kOp, "rstd");
  const auto dtype = z.scalar_type(), compute = compute_type(dtype);
  TORCH_CHECK(rstd.scalar_type() == compute && (rms || mean.scalar_type() == compute), kOp,
              ": mean and rstd must be ", compute);
  const Rows dy2(dy, dtype), z2(z, dtype), dz2 = dz ? Rows(*dz, dtype) : Rows();
  const Vector w(weight, n, kOp, "weight"), b(bias, n, kOp, "bias");
  const at::Tensor mu = mean.contiguous(), rs = rstd.contiguous();

  LayerNormBwd args{};
  args.dropout = check_dropout(dropout_p, seed, kOp);
  args.dropout_rows = check_rows(dropout_rows, rows, kOp);
  const auto options = z.options(), statistics = z.options().dtype(compute);
  const bool split = args.dropout.active();
  at::Tensor dx = new_output(z.sizes(), options);
  at::Tensor dresidual = split ? new_output(z.sizes(), options) : at::empty({0}, options);
  const int64_t blocks = std::clamp<int64_t>(std::min(rows, rows * n / kGrain), 1, 16);
  const auto gradient = [&](const Vector& of, bool needed) {
    return at::empty({needed ? n : 0}, of.owner.defined() ? of.owner.options() : statistics);
  };
  at::Tensor dweight = gradient(w, need_weight), dbias = gradient(b, need_bias);
  const at::Tensor sums = at::empty({blocks, 2, n}, statistics);

  args.dy = dy2.data;
  args.dz = dz2.data;
  args.z = z2.data;
  args.dy_stride_m = dy2.stride;
  args.dz_stride_m = dz2.stride;
  args.z_stride_m = z2.stride;
  args.mean = rms ? nullptr : mu.const_data_ptr();
  args.rstd = rs.const_data_ptr();
  args.weight = w.parameter;
  args.dx = dx.mutable_data_ptr();
  args.dresidual = split ? dresidual.mutable_data_ptr() : nullptr;
  args.dweight = {need_weight ? dweight.mutable_data_ptr() : nullptr,
                  dtype_of(dweight.scalar_type())};
  args.dbias = {need_bias ? dbias.mutable_data_ptr() : nullptr, dtype_of(dbias.scalar_type())};
  args.sums = sums.mutable_data_ptr();
  args.rows = rows;
  args.n = n;
  args.blocks = blocks;
  args.block = (rows + blocks - 1) / blocks;
  args.eps_outside = eps_outside;
  args.unbiased = unbiased;
  args.past_caches = goes_past_caches(dx);
  at::parallel_for(0, blocks, 1, [&](int64_t begin, int64_t end) {
    WideRows wide(4 * n * rstd.element_size());
    for (int64_t block = begin; block < end; ++block)
      TFM_KERNEL(layer_norm_bwd)(args, dtype_of(dtype), block, wide.data);
  });
  TFM_KERNEL(layer_norm_bwd_join)(args, dtype_of(dtype));
  return {dx, dresidual, dweight, dbias};
}

TORCH_LIBRARY_IMPL(tfm_kernels, CPU, m) { m.impl("layer_norm_bwd_cpu", &layer_norm_bwd_cpu); }

}  // namespace
}  // namespace tfm_kernels
#endif
