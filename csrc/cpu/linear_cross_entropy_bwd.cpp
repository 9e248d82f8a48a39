// linear_cross_entropy_bwd, CPU. Implements LCE.4 and LCE.5 of
// tfm_kernels/ops/linear_cross_entropy.py.
// Owns:    rows are taken in blocks of a few hundred, with working memory that is used again for
//          every block. One task of `prepare` = a tile of rows of x, laid out for the products; one
//          task of `classes` = up to 512 classes, for which it computes the logits of a tile of
//          rows in L2 again, makes dz of them and adds to dweight and dbias; one task of `input` =
//          columns of dx. Every element has one owner that adds in one order: the result does not
//          depend on the number of threads.
// Traffic: a block reads the weights twice and dweight twice, dz is written and read once;
//          6*M*K*V FLOPs and M*V powers of two.
// Limits:  none. Sums in float32, in float64 for float64; bfloat16 products where the CPU has them.
// Source:  own work.
#include <limits>
#include <utility>

#include "gradient.h"
#include "isa.h"
#include "linear_cross_entropy.h"
#include "softmax.h"

namespace tfm_kernels {

struct CrossEntropyBwd {
  const void *x, *weight, *bias;  // weight contiguous; bias may be null
  const void *dloss, *lse;        // (M) of the compute type
  const int64_t* target;          // (M)
  void *dx, *dweight;             // null where not wanted
  double* dbias;                  // (V), null where not wanted
  int64_t x_stride_m, M, K, V;
  bool bf16_tiles;                    // bfloat16 is multiplied as it is stored
  double target_share, other_share;   // 1 - s and s / V of LCE.4
  int64_t block, tile, panel, chunk;  // rows; classes a task
  // Working memory, in the type of operands but for the sums, which are of the compute type: dx's
  // and dweight's are the results where those are.
  void* x_t;                   // tiles of panels, each (K, width), of the present block
  void* x_panels;              // panels of columns, each (block, width)
  Slices dz;                   // of the present block
  void *dx_sum, *dweight_sum;  // (block, K) of the present block, (V, K)
};

constexpr int64_t kDzPad = 16;  // between rows of dz: a power of two apart they would thrash L1

// Elements of working memory that one task of `classes` or `input` needs.
inline int64_t cross_entropy_bwd_scratch(const CrossEntropyBwd& args) {
  return std::max(args.chunk * (args.panel + args.tile + kDzPad) + logits_scratch(args.K),
                  std::min(args.V, kGradientSumStep) * round_up(args.K, kPanel));
}

// `row` is the first of the present block, which has `rows`; begin and end count within it.
TFM_DECLARE_KERNEL(void cross_entropy_bwd_prepare(const CrossEntropyBwd& args, DType dtype,
                                                  int64_t row, int64_t begin, int64_t end))
TFM_DECLARE_KERNEL(void cross_entropy_bwd_classes(const CrossEntropyBwd& args, DType dtype,
                                                  int64_t row, int64_t rows, int64_t first,
                                                  void* scratch))
// Columns first..last - 1 of dx; `first` is a multiple of kPanel.
TFM_DECLARE_KERNEL(void cross_entropy_bwd_input(const CrossEntropyBwd& args, DType dtype,
                                                int64_t row, int64_t begin, int64_t end,
                                                int64_t first, int64_t last, void* scratch))

inline namespace CPU_CAPABILITY {
namespace {

template <typename T, typename O>
void prepare(const CrossEntropyBwd& args, int64_t row, int64_t begin, int64_t end) {
  const T* x = static_cast<const T*>(args.x) + (row + begin) * args.x_stride_m;
  for_panels(args.tile, args.panel, end - begin, [&](int64_t p, int64_t ld, int64_t real) {
    turn_right(x + p * args.x_stride_m, args.x_stride_m, real, args.K,
               static_cast<O*>(args.x_t) + (begin + p) * args.K, ld, ld);
  });
  if (args.dweight)
    pack_panels(x, args.x_stride_m, end - begin, args.K,
                static_cast<O*>(args.x_panels) + begin * kGradientPanel,
                args.block * kGradientPanel);
}

// What LCE.4 needs of the rows of a panel, by itself; rows that are not there have no gradient.
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
  const V shift(bias), step(static_cast<C>(kLog2e)), share(other_share);
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
  C *z = carve(args.chunk * args.panel), *wide = carve(logits_scratch(K));
  O* dz = reinterpret_cast<O*>(carve(args.chunk * dz_ld));
  const T* weight = static_cast<const T*>(args.weight) + first * K;
  const T* bias = args.bias ? static_cast<const T*>(args.bias) + first : nullptr;
  const C target_share = static_cast<C>(args.target_share);
  const C other_share = static_cast<C>(args.other_share), step = static_cast<C>(kLog2e);
  double sums[512] = {};  // of dbias
  for (int64_t t = 0; t < rows; t += args.tile) {
    const int64_t m = std::min(args.tile, rows - t);
    for_panels(args.tile, args.panel, m, [&](int64_t p, int64_t ld, int64_t real) {
      logits(weight, n, K, static_cast<const O*>(args.x_t) + (t + p) * K, ld, z, wide);
      const PanelRows<C> there(args, row + t + p, real, ld);
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
        const int64_t i = args.target[row + t + p + r] - first;
        if (i < 0 || i >= n) continue;
        const C of_bias = bias ? static_cast<C>(bias[i]) : C(0);
        const C q = exp2_fast((z[i * ld + r] + of_bias - there.lse[r]) * step) - other_share;
        const C with = (q - target_share) * there.dloss[r], without = q * there.dloss[r];
        sums[i] += static_cast<double>(with) - static_cast<double>(without);
        dz[i * dz_ld + p + r] = static_cast<O>(with);
      }
    });
    if (args.dweight) {
      C* sum = static_cast<C*>(args.dweight_sum) + first * K;
      for (int64_t k = 0; k < K; k += kGradientPanel)
        product(n, std::min(kGradientPanel, K - k), round_up(m, kPair<O>), dz, dz_ld,
                static_cast<const O*>(args.x_panels) + k * args.block + t * kGradientPanel,
                kGradientPanel, sum + k, K, row + t > 0, kLongestGradientSum);
    }
    if (args.dx) turn_left(dz, dz_ld, n, m, args.dz.at<O>(t, first), args.dz.ld);
  }
  if (args.dbias)
    for (int64_t i = 0; i < n; ++i)
      args.dbias[first + i] = row > 0 ? args.dbias[first + i] + sums[i] : sums[i];
}

template <typename T, typename O, typename C = compute_t<T>>
void input(const CrossEntropyBwd& args, int64_t row, int64_t begin, int64_t end, int64_t first,
           int64_t last, O* panels) {
  const int64_t K = args.K, columns = last - first;
  C* dx = static_cast<C*>(args.dx_sum) + first;
  for (int64_t v = 0; v < args.V; v += kGradientSumStep)
    slice_product(args.dz, v, std::min(kGradientSumStep, args.V - v), begin, end,
                  static_cast<const T*>(args.weight) + v * K + first, K, columns, dx, K, v > 0,
                  panels);
  if constexpr (!std::is_same_v<T, C>)
    for (int64_t r = begin; r < end; ++r)
      narrow(dx + r * K, columns, static_cast<T*>(args.dx) + (row + r) * K + first);
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

void cross_entropy_bwd_input(const CrossEntropyBwd& args, DType dtype, int64_t row, int64_t begin,
                             int64_t end, int64_t first, int64_t last, void* scratch) {
  for_operands(dtype, args.bf16_tiles, [&](auto zero, auto operand) {
    using O = decltype(operand);
    input<decltype(zero), O>(args, row, begin, end, first, last, static_cast<O*>(scratch));
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

// Rows: tiles of 128, and blocks whose dz takes no more than 128 MB, of at most 1024. Classes: up
// to 512 a task, fewer to feed all threads. None of it depends on how many there are.
void pick_blocks(CrossEntropyBwd& args, DType dtype) {
  const int64_t item = args.bf16_tiles ? 2 : dtype == DType::f64 ? 8 : 4;
  args.tile = std::min<int64_t>(128, round_up(args.M, 16));
  args.panel = panel_rows(args.tile, dtype);
  const int64_t most = (int64_t{1} << 27) / (args.V * item) / args.tile;
  const int64_t tiles = std::min(std::clamp<int64_t>(most, 1, 8), ceil_div(args.M, args.tile));
  args.block = tiles * args.tile;
  args.chunk = args.V >= 16384 ? 512 : args.V >= 8192 ? 256 : args.V >= 1024 ? 128 : 64;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> linear_cross_entropy_bwd_cpu(
    const at::Tensor& dloss, const at::Tensor& x, const at::Tensor& weight,
    const OptionalTensor& bias, const at::Tensor& target, const at::Tensor& lse,
    int64_t ignore_index, double label_smoothing, bool need_x, bool need_weight, bool need_bias) {
  constexpr const char* kOp = "linear_cross_entropy_bwd_cpu";
  const CrossEntropyRows rows(x, weight, bias, target, ignore_index, label_smoothing, kOp);
  const auto M = rows.M, K = rows.K, V = rows.V;
  const auto computed = rows.dtype == DType::f64 ? at::kDouble : at::kFloat;
  const auto options = x.options();
  for (const auto& [t, name] : {std::pair(&dloss, "dloss"), std::pair(&lse, "lse")}) {
    check_shape(*t, {rows.all}, kOp, name);
    TORCH_CHECK(t->scalar_type() == computed, kOp, ": ", name, " must be ", computed, ", got ",
                t->scalar_type());
  }
  const auto result = [&](bool needed, at::IntArrayRef sizes) {
    return needed ? new_output(sizes, options) : at::empty({0}, options);
  };
  at::Tensor dx = result(need_x, {M, K}), dweight = result(need_weight, {V, K});
  at::Tensor dbias = result(need_bias, {V});
  const auto finished = [&] { return std::tuple(need_x ? rows.of_all(dx) : dx, dweight, dbias); };
  if (M == 0) {
    dweight.zero_();
    dbias.zero_();
    return finished();
  }
  if (!(need_x || need_weight || need_bias)) return finished();

  const at::Tensor dloss_rows = rows.of_live(dloss).contiguous();
  const at::Tensor lse_rows = rows.of_live(lse).contiguous();
  CrossEntropyBwd args{};
  args.x = rows.x.const_data_ptr();
  args.weight = rows.weight.const_data_ptr();
  args.bias = pointer(rows.bias);
  args.dloss = dloss_rows.const_data_ptr();
  args.lse = lse_rows.const_data_ptr();
  args.target = rows.target.const_data_ptr<int64_t>();
  args.dx = need_x ? dx.mutable_data_ptr() : nullptr;
  args.dweight = need_weight ? dweight.mutable_data_ptr() : nullptr;
  args.x_stride_m = rows.x.stride(0);
  args.M = M;
  args.K = K;
  args.V = V;
  args.bf16_tiles = rows.bf16_tiles;
  args.target_share = 1.0 - label_smoothing;
  args.other_share = label_smoothing / static_cast<double>(V);
  pick_blocks(args, rows.dtype);

  const bool wide = options.dtype() != computed;  // 16-bit storage: sums are formed elsewhere
  const auto room = [&](at::Tensor& owner, bool needed, int64_t elements) -> void* {
    if (!needed) return nullptr;
    owner = new_output({elements}, options.dtype(computed));
    return owner.mutable_data_ptr();
  };
  at::Tensor x_t, x_panels, dz, dx_sum, dweight_sum;
  args.x_t = room(x_t, true, args.block * K);
  args.x_panels = room(x_panels, need_weight, args.block * round_up(K, kPanel));
  args.dz = Slices(args.block, V);
  args.dz.data = room(dz, need_x, ceil_div(args.dz.elements(V), args.bf16_tiles ? 2 : 1));
  args.dx_sum = room(dx_sum, need_x && wide, args.block * K);
  args.dweight_sum = wide ? room(dweight_sum, need_weight, V * K) : args.dweight;
  const at::Tensor dbias_sum = at::empty({need_bias ? V : 0}, options.dtype(at::kDouble));
  args.dbias = need_bias ? dbias_sum.mutable_data_ptr<double>() : nullptr;

  const int64_t threads = at::get_num_threads(), scratch = cross_entropy_bwd_scratch(args);
  const int64_t item = rows.dtype == DType::f64 ? 8 : 4;
  const Workspace workspace(x, threads * scratch, 0);
  const auto place = [&](int64_t worker) { return workspace.first(worker * scratch); };
  for (int64_t row = 0; row < M; row += args.block) {
    const int64_t count = std::min(args.block, M - row);
    if (need_x && !wide) args.dx_sum = static_cast<char*>(args.dx) + row * K * item;
    const int64_t tiles = ceil_div(count, args.tile), chunks = ceil_div(V, args.chunk);
    for_tasks(tiles, std::min(tiles, threads), [&](int64_t tile, int64_t) {
      const int64_t begin = tile * args.tile;
      TFM_KERNEL(cross_entropy_bwd_prepare)
      (args, rows.dtype, row, begin, std::min(count, begin + args.tile));
    });
    for_tasks(chunks, std::min(chunks, threads), [&](int64_t chunk, int64_t worker) {
      TFM_KERNEL(cross_entropy_bwd_classes)
      (args, rows.dtype, row, count, chunk * args.chunk, place(worker));
    });
    if (!need_x) continue;
    // Every task packs the weights of its columns, so that rows are parted only where columns alone
    // would let threads wait.
    const int64_t panels = std::max<int64_t>(1, ceil_div(K, kPanel)), groups = ceil_div(count, 16);
    const int64_t across = std::min(threads, panels);
    const int64_t down = std::min(groups, ceil_div(threads, across));
    for_tasks(across * down, std::min(across * down, threads), [&](int64_t task, int64_t worker) {
      const int64_t i = task / across, j = task % across;
      TFM_KERNEL(cross_entropy_bwd_input)
      (args, rows.dtype, row, groups * i / down * 16, std::min(count, groups * (i + 1) / down * 16),
       panels * j / across * kPanel, std::min(K, panels * (j + 1) / across * kPanel),
       place(worker));
    });
  }
  if (dweight_sum.defined()) dweight.copy_(dweight_sum.view(dweight.sizes()));
  if (need_bias) dbias.copy_(dbias_sum);
  return finished();
}

TORCH_LIBRARY_IMPL(tfm_kernels, CPU, m) {
  m.impl("linear_cross_entropy_bwd_cpu", &linear_cross_entropy_bwd_cpu);
}

}  // namespace
}  // namespace tfm_kernels
#endif
