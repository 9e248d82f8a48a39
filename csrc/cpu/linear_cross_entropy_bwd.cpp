// linear_cross_entropy_bwd, CPU. Implements LCE.4 and LCE.5 of
// tfm_kernels/ops/linear_cross_entropy.py.
// Owns:    rows are taken in blocks of a few hundred, with working memory that is used again for
//          every block. One task of `prepare` = a tile of rows of x, laid out for the products; one
//          task of `classes` = up to 512 classes, for which it computes the logits of a tile of
//          rows in L2 again, makes dz of them and adds to dweight and dbias; one task of `input` =
//          columns of dx. Every element has one owner that adds in one order: the result does not
//          depend on the number of threads.
// Traffic: a block reads the weights twice and dweight twice, dz is written and read once;
//          6*M*K*V FLOPs and M*V powers of two, 4*M*K*V where the forward calls it with its logits.
// Limits:  none. Sums in float32, in float64 for float64; bfloat16 products where the CPU has them.
// Source:  own work.
#include "linear_cross_entropy_bwd.h"

#include <limits>
#include <utility>

#include "softmax.h"

namespace tfm_kernels {

inline namespace CPU_CAPABILITY {
namespace {

template <typename T, typename O>
void prepare(const CrossEntropyBwd& args, int64_t row, int64_t begin, int64_t end) {
  const T* x = static_cast<const T*>(args.x) + (row + begin) * args.x_stride_m;
  if (args.x_t)
    for_panels(args.tile, args.panel, end - begin, [&](int64_t p, int64_t ld, int64_t real) {
      turn_right(x + p * args.x_stride_m, args.x_stride_m, real, args.K,
                 static_cast<O*>(args.x_t) + (begin + p) * args.K, ld, ld);
    });
  if (args.x_panels)
    pack_panels(x, args.x_stride_m, end - begin, args.K,
                static_cast<O*>(args.x_panels) + begin * kGradientPanel,
                args.block * kGradientPanel);
}

// What LCE.4 needs of the rows of a panel, the first of which is `row` of the block; rows that are
// not there have no gradient.
template <typename C>
struct PanelRows {
  alignas(64) C dloss[kMaxTileRows], lse[kMaxTileRows];

  PanelRows(const CrossEntropyBwd& args, int64_t row, int64_t real, int64_t ld) {
    std::copy_n(static_cast<const C*>(args.dloss) + row, real, dloss);
    std::copy_n(static_cast<const C*>(args.lse) + row, real, lse);
    std::fill(dloss + real, dloss + ld, C(0));
    std::fill(lse + real, lse + ld, std::numeric_limits<C>::infinity());
  }
};

// LCE.4 but for the target's share, on the ld rows of a panel and one class: from z to dz; returns
// its sum.
template <typename C>
C differentiate(const PanelRows<C>& rows, const C* z, int64_t ld, C bias, C other_share, C* dz) {
  using V = at::vec::Vectorized<C>;
  const V shift(bias), step(static_cast<C>(kLog2E)), share(other_share);
  V sum(C(0));
  for (int64_t j = 0; j < ld; j += V::size()) {
    const V p = exp2_fast((V::loadu(z + j) + shift - V::loadu(rows.lse + j)) * step);
    const V d = (p - share) * V::loadu(rows.dloss + j);
    d.store(dz + j);
    sum = sum + d;
  }
  return at::vec::vec_reduce_all<C>([](const V& a, const V& b) { return a + b; }, sum);
}

template <typename T, typename O, typename C = compute_t<T>>
void classes(const CrossEntropyBwd& args, int64_t row, int64_t rows, int64_t first, C* scratch) {
  const int64_t K = args.K, n = std::min(args.chunk, args.V - first), dz_ld = args.tile + kDzPad;
  const auto carve = [&](int64_t elements) { return std::exchange(scratch, scratch + elements); };
  C *again = carve(args.chunk * args.panel), *wide = carve(widened_room(K));
  C* apart = carve(args.chunk * kGradientPanel);
  O* dz = reinterpret_cast<O*>(carve(args.chunk * dz_ld));
  const T* weight = static_cast<const T*>(args.weight) + first * K;
  const T* bias = args.bias ? static_cast<const T*>(args.bias) + first : nullptr;
  const C target_share = static_cast<C>(args.target_share);
  const C other_share = static_cast<C>(args.other_share), step = static_cast<C>(kLog2E);
  double sums[512] = {};  // of dbias
  for (int64_t t = 0; t < rows; t += args.tile) {
    const int64_t m = std::min(args.tile, rows - t);
    for_panels(args.tile, args.panel, m, [&](int64_t p, int64_t ld, int64_t real) {
      const C* z = again;
      if (args.logits)
        z = static_cast<const C*>(args.logits) + (t + p) * args.V + first * ld;
      else
        logits(weight, n, K, static_cast<const O*>(args.x_t) + (t + p) * K, ld, again, wide);
      const PanelRows<C> there(args, t + p, real, ld);
      C room[kMaxTileRows];
      for (int64_t i = 0; i < n; ++i) {
        const C of_bias = bias ? static_cast<C>(bias[i]) : C(0);
        O* out = dz + i * dz_ld + p;
        if constexpr (std::is_same_v<O, C>) {
          sums[i] += differentiate(there, z + i * ld, ld, of_bias, other_share, out);
        } else {
          sums[i] += differentiate(there, z + i * ld, ld, of_bias, other_share, room);
          narrow(room, ld, out);
        }
      }
      // of targets anew: 1 - s is subtracted before dloss multiplies
      for (int64_t r = 0; r < real; ++r) {
        const int64_t i = args.target[t + p + r] - first;
        if (i < 0 || i >= n) continue;
        const C of_bias = bias ? static_cast<C>(bias[i]) : C(0);
        const C q = exp2_fast((z[i * ld + r] + of_bias - there.lse[r]) * step) - other_share;
        const C with = (q - target_share) * there.dloss[r], without = q * there.dloss[r];
        sums[i] += static_cast<double>(with) - static_cast<double>(without);
        dz[i * dz_ld + p + r] = static_cast<O>(with);
      }
    });
    for (int64_t k = 0; args.x_panels && k < K; k += kGradientPanel) {
      const int64_t width = std::min(kGradientPanel, K - k), at = first * K + k;
      C* sum = args.dweight ? apart : static_cast<C*>(args.dweight_sum) + at;
      product(n, width, round_up(m, kPair<O>), dz, dz_ld,
              static_cast<const O*>(args.x_panels) + k * args.block + t * kGradientPanel,
              kGradientPanel, sum, args.dweight ? kGradientPanel : K, row + t > 0,
              kLongestGradientSum);
      if (args.dweight)
        for (int64_t i = 0; i < n; ++i)
          narrow(apart + i * kGradientPanel, width, static_cast<T*>(args.dweight) + at + i * K);
    }
    if (args.dx_sum) turn_left(dz, dz_ld, n, m, args.dz.at<O>(t, first), args.dz.ld);
  }
  if (args.dbias)
    for (int64_t i = 0; i < n; ++i)
      args.dbias[first + i] = row > 0 ? args.dbias[first + i] + sums[i] : sums[i];
}

template <typename T, typename O, typename C = compute_t<T>>
void input(const CrossEntropyBwd& args, int64_t begin, int64_t end, int64_t first, int64_t last,
           O* panels) {
  const int64_t K = args.K, columns = last - first;
  C* dx = static_cast<C*>(args.dx_sum) + first;
  for (int64_t v = 0; v < args.V; v += kGradientSumStep)
    slice_product(args.dz, v, std::min(kGradientSumStep, args.V - v), begin, end,
                  static_cast<const T*>(args.weight) + v * K + first, K, columns, dx, K, v > 0,
                  panels);
  if (args.dx)
    for (int64_t r = begin; r < end; ++r)
      narrow(dx + r * K, columns, static_cast<T*>(args.dx) + r * K + first);
}

}  // namespace

void cross_entropy_bwd_prepare(const CrossEntropyBwd& args, DType dtype, int64_t row, int64_t begin,
                               int64_t end) {
  for_operands(dtype, args.bf16_tiles, [&](auto zero, auto operand) {
    prepare<decltype(zero), decltype(operand)>(args, row, begin, end);
  });
}

void cross_entropy_bwd_classes(const CrossEntropyBwd& args, DType dtype, int64_t row, int64_t rows,
                               int64_t first, void* scratch) {
  for_operands(dtype, args.bf16_tiles, [&](auto zero, auto operand) {
    using T = decltype(zero);
    classes<T, decltype(operand)>(args, row, rows, first, static_cast<compute_t<T>*>(scratch));
  });
}

void cross_entropy_bwd_input(const CrossEntropyBwd& args, DType dtype, int64_t begin, int64_t end,
                             int64_t first, int64_t last, void* scratch) {
  for_operands(dtype, args.bf16_tiles, [&](auto zero, auto operand) {
    using O = decltype(operand);
    input<decltype(zero), O>(args, begin, end, first, last, static_cast<O*>(scratch));
  });
}

void cross_entropy_bwd_scale(const void* sums, double factor, int64_t n, DType dtype, void* out) {
  for_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    using C = compute_t<T>;
    const C* from = static_cast<const C*>(sums);
    fill_lanes(static_cast<T*>(out), n, false, [&]<typename V>(int64_t i) {
      return load<V>(from + i) * V(static_cast<C>(factor));
    });
  });
}

}  // namespace CPU_CAPABILITY
}  // namespace tfm_kernels

#ifdef CPU_CAPABILITY_DEFAULT
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <tuple>

namespace tfm_kernels {
namespace {

// Rows: tiles of 128, and blocks whose logits and dz take no more than 64 MB each, of at most
// 1024. Classes: up to 512 a task, fewer to feed all threads. None of it depends on how many there
// are.
void pick_blocks(CrossEntropyBwd& args, DType dtype) {
  const int64_t item = dtype == DType::f64 ? 8 : 4;
  args.tile = std::min<int64_t>(128, round_up(args.M, 16));
  args.panel = panel_rows(args.tile, dtype);
  const int64_t most = (int64_t{1} << 26) / (args.V * item) / args.tile;
  const int64_t tiles = std::min(std::clamp<int64_t>(most, 1, 8), ceil_div(args.M, args.tile));
  args.block = tiles * args.tile;
  args.chunk = args.V >= 16384 ? 512 : args.V >= 8192 ? 256 : args.V >= 1024 ? 128 : 64;
  // in one slice of dz no task crosses into another
  if (args.V <= kGradientSumStep)
    args.chunk = std::min<int64_t>(64, round_up(ceil_div(args.V, 8), 16));
}

}  // namespace

CrossEntropyGradients::CrossEntropyGradients(const CrossEntropyRows& rows, double label_smoothing,
                                             bool keeps_logits, const at::Tensor& dx,
                                             const at::Tensor& dweight, const at::Tensor& dbias)
    : rows_(rows),
      dx_(dx),
      dweight_(dweight),
      dbias_(dbias),
      item_(rows.dtype == DType::f64 ? 8 : 4) {
  const int64_t K = rows.K, V = rows.V;
  args_.weight = rows.weight.const_data_ptr();
  args_.bias = keeps_logits ? nullptr : pointer(rows.bias);
  args_.x = rows.x.const_data_ptr();
  args_.x_stride_m = rows.x.stride(0);
  args_.M = rows.M;
  args_.K = K;
  args_.V = V;
  args_.bf16_tiles = rows.bf16_tiles;
  args_.target_share = 1.0 - label_smoothing;
  args_.other_share = label_smoothing / static_cast<double>(V);
  pick_blocks(args_, rows.dtype);
  const bool wants_dx = dx.dim() == 2, wants_dweight = dweight.dim() == 2;
  const bool narrow =
      dx.scalar_type() != compute_type(dx.scalar_type());              // sums are formed elsewhere
  const int64_t block = args_.block, pair = args_.bf16_tiles ? 2 : 1;  // operands an element
  args_.logits = room(logits_, keeps_logits, block * V);
  args_.x_t = room(x_t_, !keeps_logits, ceil_div(block * K, pair));
  args_.x_panels = room(x_panels_, wants_dweight, ceil_div(block * round_up(K, kPanel), pair));
  args_.dz = Slices(block, V);
  args_.dz.data = room(dz_, wants_dx, ceil_div(args_.dz.elements(V), pair));
  args_.dx_sum = room(dx_sum_, wants_dx && narrow, block * K);
  const bool apart = narrow && rows.M <= args_.tile;
  args_.dweight_sum = room(dweight_sum_, wants_dweight && narrow && !apart, V * K);
  if (wants_dweight && (apart || !narrow))
    (apart ? args_.dweight : args_.dweight_sum) = dweight.mutable_data_ptr();
  const bool wants_dbias = dbias.numel() == V;
  dbias_sum_ = at::empty({wants_dbias ? V : 0}, dbias.options().dtype(at::kDouble));
  args_.dbias = wants_dbias ? dbias_sum_.mutable_data_ptr<double>() : nullptr;
  scratch_ = at::empty({at::get_num_threads() * cross_entropy_bwd_scratch(args_)},
                       rows.x.options().dtype(compute_type(rows.x.scalar_type())));
}

void* CrossEntropyGradients::room(at::Tensor& owner, bool needed, int64_t elements) const {
  if (!needed) return nullptr;
  owner = new_output({elements}, rows_.x.options().dtype(compute_type(rows_.x.scalar_type())));
  return owner.mutable_data_ptr();
}

void CrossEntropyGradients::add(int64_t row, const void* dloss, const void* lse) {
  const int64_t K = args_.K, count = std::min(args_.block, args_.M - row);
  const int64_t threads = at::get_num_threads();
  args_.dloss = dloss;
  args_.lse = lse;
  args_.target = rows_.target.const_data_ptr<int64_t>() + row;
  const bool wants_dx = dx_.dim() == 2;
  if (wants_dx) {
    char* dx = static_cast<char*>(dx_.mutable_data_ptr()) + row * K * dx_.element_size();
    (dx_sum_.defined() ? args_.dx : args_.dx_sum) = dx;
  }
  const int64_t scratch = cross_entropy_bwd_scratch(args_);
  const auto place = [&](int64_t worker) {
    return static_cast<char*>(scratch_.mutable_data_ptr()) + worker * scratch * item_;
  };
  const int64_t tiles = ceil_div(count, args_.tile), chunks = ceil_div(args_.V, args_.chunk);
  for_tasks(tiles, std::min(tiles, threads), [&](int64_t tile, int64_t) {
    const int64_t begin = tile * args_.tile;
    TFM_KERNEL(cross_entropy_bwd_prepare)
    (args_, rows_.dtype, row, begin, std::min(count, begin + args_.tile));
  });
  for_tasks(chunks, std::min(chunks, threads), [&](int64_t chunk, int64_t worker) {
    TFM_KERNEL(cross_entropy_bwd_classes)
    (args_, rows_.dtype, row, count, chunk * args_.chunk, place(worker));
  });
  if (!wants_dx) return;
  // Every task packs the weights of its columns, so that rows are parted only where columns alone
  // would let threads wait.
  const int64_t panels = std::max<int64_t>(1, ceil_div(K, kPanel)), groups = ceil_div(count, 16);
  const int64_t across = std::min(threads, panels);
  const int64_t down = std::min(groups, ceil_div(threads, across));
  for_tasks(across * down, std::min(across * down, threads), [&](int64_t task, int64_t worker) {
    const int64_t i = task / across, j = task % across;
    TFM_KERNEL(cross_entropy_bwd_input)
    (args_, rows_.dtype, groups * i / down * 16, std::min(count, groups * (i + 1) / down * 16),
     panels * j / across * kPanel, std::min(K, panels * (j + 1) / across * kPanel), place(worker));
  });
}

void CrossEntropyGradients::finish() const {
  if (dweight_sum_.defined()) dweight_.copy_(dweight_sum_.view(dweight_.sizes()));
  if (args_.dbias) dbias_.copy_(dbias_sum_);
}

namespace {

using ThreeTensors = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

// Of the gradients of the sum of losses those of a loss whose rows all have this gradient.
ThreeTensors scaled(DType dtype, const at::TensorOptions& options, double dloss,
                    const at::Tensor& gx, const at::Tensor& gweight, const at::Tensor& gbias,
                    bool need_x, bool need_weight, bool need_bias) {
  const auto result = [&](const at::Tensor& sums, bool needed) {
    if (!needed) return at::empty({0}, options);
    const at::Tensor from = sums.contiguous();
    at::Tensor out = new_output(sums.sizes(), options);
    const int64_t item = from.element_size(), stored = out.element_size();
    const char* source = static_cast<const char*>(from.const_data_ptr());
    char* target = static_cast<char*>(out.mutable_data_ptr());
    at::parallel_for(0, from.numel(), 1 << 15, [&](int64_t begin, int64_t end) {
      TFM_KERNEL(cross_entropy_bwd_scale)
      (source + begin * item, dloss, end - begin, dtype, target + begin * stored);
    });
    return out;
  };
  return {result(gx, need_x), result(gweight, need_weight), result(gbias, need_bias)};
}

ThreeTensors linear_cross_entropy_bwd_cpu(const at::Tensor& dloss, const at::Tensor& x,
                                          const at::Tensor& weight, const OptionalTensor& bias,
                                          const at::Tensor& target, const at::Tensor& lse,
                                          const at::Tensor& gx, const at::Tensor& gweight,
                                          const at::Tensor& gbias, int64_t ignore_index,
                                          double label_smoothing, bool need_x, bool need_weight,
                                          bool need_bias) {
  constexpr const char* kOp = "linear_cross_entropy_bwd_cpu";
  const CrossEntropyCall call(x, weight, bias, target, ignore_index, label_smoothing, kOp);
  const auto M = call.M, K = call.K, V = call.V;
  const auto type = compute_type(x.scalar_type());
  const auto options = x.options();
  for (const auto& [t, name] : {std::pair(&dloss, "dloss"), std::pair(&lse, "lse")}) {
    check_shape(*t, {call.all}, kOp, name);
    TORCH_CHECK(t->scalar_type() == type, kOp, ": ", name, " must be ", type, ", got ",
                t->scalar_type());
  }
  const at::Tensor dloss_rows = call.of_live(dloss).contiguous();
  const auto saved = [&](const at::Tensor& sums, bool needed, at::IntArrayRef sizes) {
    return !needed || (sums.sizes() == sizes && sums.scalar_type() == type);
  };
  if (M > 0 && saved(gx, need_x, {call.all, K}) && saved(gweight, need_weight, {V, K}) &&
      saved(gbias, need_bias, {V}) && dloss_rows.eq(dloss_rows[0]).all().item<bool>())
    return scaled(dtype_of(x.scalar_type()), options, dloss_rows[0].item<double>(), gx, gweight,
                  gbias, need_x, need_weight, need_bias);

  const auto result = [&](bool needed, at::IntArrayRef sizes) {
    return needed ? new_output(sizes, options) : at::empty({0}, options);
  };
  at::Tensor dx = result(need_x, {M, K}), dweight = result(need_weight, {V, K});
  at::Tensor dbias = result(need_bias, {V});
  if (M == 0) {
    dweight.zero_();
    dbias.zero_();
  } else if (need_x || need_weight || need_bias) {
    const CrossEntropyRows rows(call, x, weight, bias, target);
    const at::Tensor lse_rows = call.of_live(lse).contiguous();
    CrossEntropyGradients gradients(rows, label_smoothing, false, dx, dweight, dbias);
    const int64_t item = dloss_rows.element_size();
    const char* dlosses = static_cast<const char*>(dloss_rows.const_data_ptr());
    const char* sums = static_cast<const char*>(lse_rows.const_data_ptr());
    for (int64_t row = 0; row < M; row += gradients.blocks().block)
      gradients.add(row, dlosses + row * item, sums + row * item);
    gradients.finish();
  }
  return {need_x ? call.of_all(dx) : dx, dweight, dbias};
}

TORCH_LIBRARY_IMPL(tfm_kernels, CPU, m) {
  m.impl("linear_cross_entropy_bwd_cpu", &linear_cross_entropy_bwd_cpu);
}

}  // namespace
}  // namespace tfm_kernels
#endif
