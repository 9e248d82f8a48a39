// linear_cross_entropy_fwd, CPU. Implements LCE.1 to LCE.3 of
// tfm_kernels/ops/linear_cross_entropy.py.
// Owns:    one task = a tile of rows and a segment of classes, up to 512 classes at a time, whose
//          logits lie transposed, (classes, rows), in L2; it leaves each row's maximum, sum of
//          powers, sum of logits and target's logit. The host joins the segments of a row.
// Traffic: a tile reads the weights once, from L3 or memory; 2*M*K*V FLOPs and M*V powers of two.
// Limits:  none. Sums in float32, in float64 for float64; bfloat16 products where the CPU has them.
//          Tiles and segments do not depend on how many threads there are, but for the width of a
//          tile, which no sum runs along.
// Source:  own work; the softmax over tiles is that of Milakov and Gimelshein 2018,
//          arXiv:1805.02867.
#include <cmath>
#include <limits>

#include "linear_cross_entropy_bwd.h"
#include "softmax.h"

namespace tfm_kernels {

struct CrossEntropyFwd {
  const void *x, *weight, *bias;  // weight contiguous; bias may be null
  const int64_t* target;          // (M)
  void* logits;                   // panels of rows, each (V, width), or null: they are not kept
  void* found;                    // (segments, kFound, found_ld) of the compute type
  int64_t x_stride_m, M, K, V, found_ld;
  bool bf16_tiles;                      // bfloat16 is multiplied as it is stored
  bool smoothed;                        // whether the sum of logits is wanted
  int64_t tile, panel, chunk, segment;  // rows of a tile and of a panel of it; classes
};

// What a segment leaves of each row.
enum Found { kMost, kSum, kTotal, kOwn, kFound };

// Elements of working memory that a task needs.
inline int64_t cross_entropy_fwd_scratch(const CrossEntropyFwd& args) {
  return (args.K + args.chunk) * args.panel + widened_room(args.K);
}

TFM_DECLARE_KERNEL(void cross_entropy_fwd(const CrossEntropyFwd& args, DType dtype, int64_t tile,
                                          int64_t segment, void* scratch))

inline namespace CPU_CAPABILITY {
namespace {

// Takes n more classes into the maxima and sums of kWide vectors of rows; z has its bias after it.
template <int kWide, typename C>
void take_columns(C* z, int64_t n, int64_t ld, const C* bias, C* most, C* sum) {
  using V = at::vec::Vectorized<C>;
  V before[kWide], now[kWide], added[kWide];
#pragma GCC unroll 4
  for (int c = 0; c < kWide; ++c) now[c] = before[c] = V::loadu(most + c * V::size());
  for (int64_t i = 0; i < n; ++i) {
#pragma GCC unroll 4
    for (int c = 0; c < kWide; ++c) {
      C* place = z + i * ld + c * V::size();
      V value = V::loadu(place);
      if (bias) {
        value = value + V(bias[i]);
        value.store(place);
      }
      now[c] = at::vec::clamp_min(value, now[c]);  // not NaN, which the sum will show
    }
  }
  const V least(-std::numeric_limits<C>::infinity()), step(static_cast<C>(kLog2E));
#pragma GCC unroll 4
  for (int c = 0; c < kWide; ++c) {
    now[c].store(most + c * V::size());
    now[c] = V::blendv(now[c], V(C(0)), now[c] == least);  // of -inf alone nothing is subtracted
    added[c] = V::loadu(sum + c * V::size()) * exp2_fast((before[c] - now[c]) * step);
  }
  for (int64_t i = 0; i < n; ++i)
#pragma GCC unroll 4
    for (int c = 0; c < kWide; ++c)
      added[c] = added[c] + exp2_fast((V::loadu(z + i * ld + c * V::size()) - now[c]) * step);
#pragma GCC unroll 4
  for (int c = 0; c < kWide; ++c) added[c].store(sum + c * V::size());
}

// Adds the logits of n more classes to each row's total, 16 classes apart from the others, so that
// equal terms do not pile up in one long sum.
template <typename C>
void add_totals(const C* z, int64_t n, int64_t ld, C* total) {
  for (int64_t begin = 0; begin < n; begin += 16) {
    const int64_t end = std::min(begin + 16, n);
    for_lanes<C>(ld, [&]<typename V>(int64_t j) {
      V part = load<V>(z + begin * ld + j);
      for (int64_t i = begin + 1; i < end; ++i) part = part + load<V>(z + i * ld + j);
      store(total + j, load<V>(total + j) + part);
    });
  }
}

template <typename T, typename O, typename C = compute_t<T>>
void tile_segment(const CrossEntropyFwd& args, int64_t tile, int64_t segment, C* scratch) {
  using V = at::vec::Vectorized<C>;
  constexpr int kWide = 4;
  const int64_t K = args.K, row = tile * args.tile, first = segment * args.segment;
  const int64_t last = std::min(args.V, first + args.segment);
  O* x_t = reinterpret_cast<O*>(scratch);
  C *passing = scratch + K * args.panel, *wide = passing + args.chunk * args.panel;
  const T* weight = static_cast<const T*>(args.weight);
  for_panels(args.tile, args.panel, args.M - row, [&](int64_t p, int64_t ld, int64_t real) {
    C* found = static_cast<C*>(args.found) + segment * kFound * args.found_ld + row + p;
    C *most = found + kMost * args.found_ld, *sum = found + kSum * args.found_ld;
    C *total = found + kTotal * args.found_ld, *own = found + kOwn * args.found_ld;
    std::fill_n(most, ld, -std::numeric_limits<C>::infinity());
    std::fill_n(sum, ld, C(0));
    std::fill_n(total, ld, C(0));
    turn_right(static_cast<const T*>(args.x) + (row + p) * args.x_stride_m, args.x_stride_m, real,
               K, x_t, ld, ld);
    C bias[512];  // chunk at most
    for (int64_t v = first; v < last; v += args.chunk) {
      const int64_t n = std::min(args.chunk, last - v);
      C* z = passing;
      if (args.logits) z = static_cast<C*>(args.logits) + (row + p) * args.V + v * ld;
      logits(weight + v * K, n, K, x_t, ld, z, wide);
      if (args.bias) widen(static_cast<const T*>(args.bias) + v, n, bias);
      const C* shift = args.bias ? bias : nullptr;
      int64_t j = 0;
      for (; j + kWide * V::size() <= ld; j += kWide * V::size())
        take_columns<kWide>(z + j, n, ld, shift, most + j, sum + j);
      for (; j < ld; j += V::size()) take_columns<1>(z + j, n, ld, shift, most + j, sum + j);
      if (args.smoothed) add_totals(z, n, ld, total);
      for (int64_t r = 0; r < real; ++r) {
        const int64_t target = args.target[row + p + r] - v;
        if (target >= 0 && target < n) own[r] = z[target * ld + r];
      }
    }
  });
}

}  // namespace

void cross_entropy_fwd(const CrossEntropyFwd& args, DType dtype, int64_t tile, int64_t segment,
                       void* scratch) {
  for_operands(dtype, args.bf16_tiles, [&](auto zero, auto operand) {
    using T = decltype(zero);
    tile_segment<T, decltype(operand)>(args, tile, segment, static_cast<compute_t<T>*>(scratch));
  });
}

}  // namespace CPU_CAPABILITY
}  // namespace tfm_kernels

#ifdef CPU_CAPABILITY_DEFAULT
#include <ATen/Parallel.h>
#include <ATen/ops/ones.h>
#include <torch/library.h>

#include <tuple>

namespace tfm_kernels {
namespace {

// 64 to 2048 a segment, so that few rows have work for several threads; up to 512 at a time.
void pick_classes(CrossEntropyFwd& args) {
  const int64_t parts = std::max<int64_t>(1, 1024 / round_up(args.M, kMaxTileRows / 2));
  const int64_t most = std::clamp<int64_t>(round_up(ceil_div(args.V, parts), 64), 64, 2048);
  args.segment = round_up(ceil_div(args.V, ceil_div(args.V, most)), 16);  // not 64 and 1
  args.chunk = std::min<int64_t>(512, args.segment);
}

// LCE.2 and LCE.3 of a row, from what its segments left.
template <typename C>
void join(const CrossEntropyFwd& args, int64_t row, double label_smoothing, C* loss, C* lse) {
  const auto found = [&](int64_t segment, Found what) {
    return static_cast<double>(
        static_cast<const C*>(args.found)[(segment * kFound + what) * args.found_ld + row]);
  };
  const int64_t segments = ceil_div(args.V, args.segment);
  const int64_t target = args.target[row];
  double most = -std::numeric_limits<double>::infinity(), sum = 0.0, total = 0.0;
  for (int64_t i = 0; i < segments; ++i) most = std::max(most, found(i, kMost));
  for (int64_t i = 0; i < segments; ++i) {
    const double there = found(i, kSum);
    // (-inf) - (-inf) is no number, and a segment of -inf alone adds nothing
    sum += there == 0.0 ? 0.0 : there * std::exp(found(i, kMost) - most);
    total += found(i, kTotal);
  }
  const double own = found(target / args.segment, kOwn);
  const double grown = std::log(sum);
  lse[row] = static_cast<C>(most + grown);
  double value = (1.0 - label_smoothing) * (most - own);
  if (label_smoothing > 0.0)
    value += label_smoothing * (most - total / static_cast<double>(args.V));
  loss[row] = static_cast<C>(value + grown);
}

// The losses and lse of rows row..row + args.M - 1.
void run(CrossEntropyFwd& args, const CrossEntropyRows& rows, int64_t row, double label_smoothing,
         const at::Tensor& loss, const at::Tensor& lse) {
  pick_classes(args);
  args.found_ld = round_up(args.M, args.tile);
  args.x = static_cast<const char*>(rows.x.const_data_ptr()) +
           row * rows.x.stride(0) * rows.x.element_size();
  args.target = rows.target.const_data_ptr<int64_t>() + row;
  const int64_t segments = ceil_div(args.V, args.segment);
  const int64_t tasks = args.found_ld / args.tile * segments;
  const int64_t workers = std::min<int64_t>(tasks, at::get_num_threads());
  const int64_t room = cross_entropy_fwd_scratch(args);
  const Workspace workspace(rows.x, segments * kFound * args.found_ld, workers * room);
  args.found = workspace.first(0);
  for_tasks(tasks, workers, [&](int64_t task, int64_t worker) {
    TFM_KERNEL(cross_entropy_fwd)
    (args, rows.dtype, task / segments, task % segments, workspace.second(worker * room));
  });
  const auto join_all = [&](auto zero) {
    using C = decltype(zero);
    C *losses = loss.mutable_data_ptr<C>() + row, *sums = lse.mutable_data_ptr<C>() + row;
    at::parallel_for(0, args.M, 1024, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) join(args, i, label_smoothing, losses, sums);
    });
  };
  rows.dtype == DType::f64 ? join_all(double{}) : join_all(float{});
}

using FiveTensors = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

FiveTensors linear_cross_entropy_fwd_cpu(const at::Tensor& x, const at::Tensor& weight,
                                         const OptionalTensor& bias, const at::Tensor& target,
                                         int64_t ignore_index, double label_smoothing, bool save_x,
                                         bool save_weight, bool save_bias) {
  const CrossEntropyCall call(x, weight, bias, target, ignore_index, label_smoothing,
                              "linear_cross_entropy_fwd_cpu");
  const auto options = x.options().dtype(compute_type(x.scalar_type()));
  const auto M = call.M, K = call.K, V = call.V;
  const auto result = [&](bool wanted, at::IntArrayRef sizes) {
    return wanted ? new_output(sizes, options) : at::empty({0}, options);
  };
  const at::Tensor loss = at::empty({M}, options), lse = at::empty({M}, options);
  at::Tensor gx = result(save_x, {M, K}), gweight = result(save_weight, {V, K});
  at::Tensor gbias = result(save_bias, {V});
  const auto finished = [&] {
    return FiveTensors(call.of_all(loss), call.of_all(lse), save_x ? call.of_all(gx) : gx, gweight,
                       gbias);
  };
  if (M == 0) {
    gweight.zero_();
    gbias.zero_();
    return finished();
  }

  const CrossEntropyRows rows(call, x, weight, bias, target);
  CrossEntropyFwd args{};
  args.weight = rows.weight.const_data_ptr();
  args.bias = pointer(rows.bias);
  args.x_stride_m = rows.x.stride(0);
  args.M = M;
  args.K = K;
  args.V = V;
  args.bf16_tiles = rows.bf16_tiles;
  args.smoothed = label_smoothing > 0.0;
  if (!(save_x || save_weight || save_bias)) {
    args.tile = tile_rows(M, kMaxTileRows / 2, at::get_num_threads());
    args.panel = panel_rows(args.tile, rows.dtype);
    run(args, rows, 0, label_smoothing, loss, lse);
    return finished();
  }
  // Block by block, while the logits are there.
  CrossEntropyGradients gradients(rows, label_smoothing, true, gx, gweight, gbias);
  const CrossEntropyBwd& blocks = gradients.blocks();
  args.logits = blocks.logits;
  args.tile = blocks.tile;
  args.panel = blocks.panel;
  const at::Tensor ones = at::ones({blocks.block}, options);
  for (int64_t row = 0; row < M; row += blocks.block) {
    args.M = std::min(blocks.block, M - row);
    run(args, rows, row, label_smoothing, loss, lse);
    gradients.add(row, ones.const_data_ptr(),
                  static_cast<const char*>(lse.const_data_ptr()) + row * lse.element_size());
  }
  gradients.finish();
  return finished();
}

TORCH_LIBRARY_IMPL(tfm_kernels, CPU, m) {
  m.impl("linear_cross_entropy_fwd_cpu", &linear_cross_entropy_fwd_cpu);
}

}  // namespace
}  // namespace tfm_kernels
#endif
