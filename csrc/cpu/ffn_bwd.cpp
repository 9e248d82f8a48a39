// ffn_bwd, CPU: the host. Implements FFN.5 to FFN.7 of tfm_kernels/ops/ffn.py with the kernels of
// ffn_bwd_tile.cpp, ffn_bwd_few_rows.cpp and ffn_bwd_db2.cpp. Config:  pick_blocks() below. Source:
// own work.
#ifdef CPU_CAPABILITY_DEFAULT
#include "ffn_bwd.h"

#include <ATen/Parallel.h>
#include <torch/library.h>

#include <tuple>
#include <vector>

#include "few_rows.h"
#include "ffn.h"
#include "operand.h"

namespace tfm_kernels {
namespace {

// Rows at a time in `hidden`, a strip: what leaves h, dp and their like in L2; spread evenly, and
// the same for any number of threads, because the sums follow it. Strips a block: 512 rows a
// thread, so that packing the weights costs little in `input`. Features a task: 128, or 64 to feed
// all threads.
void pick_blocks(FfnBwd& args, int64_t threads) {
  const int64_t most = 512, strips = ceil_div(args.M, most);
  const int64_t blocks = ceil_div(strips, std::clamp<int64_t>(threads, 2, 8));
  args.strip = round_up(ceil_div(args.M, strips), 16);
  args.block = args.strip * ceil_div(strips, blocks);
  args.chunk = ceil_div(args.F, 128) >= threads ? 128 : 64;
}

// The working memory of a call. Where storage is the compute type, sums are formed in the results
// themselves.
struct Memory {
  at::TensorOptions options;
  bool wide;  // 16-bit storage: sums are formed elsewhere, and rows widened unless tiles take them
  at::Tensor x_panels, dy_t, x_rows, dy_rows, dp, dg, dx_sum, dw1_sum, dw2_sum, dgate_sum, db1_sum;

  Memory(FfnBwd& args, const at::Tensor& x)
      : options(x.options().dtype(compute_type(x.scalar_type()))),
        wide(x.scalar_type() == at::kHalf || x.scalar_type() == at::kBFloat16) {
    const int64_t E = args.E, F = args.F, Eo = args.Eo, block = args.block;
    args.dy_t_ld = block + 16;  // not a power of two, either
    args.x_panels = room(x_panels, args.dw1 || args.dgate, round_up(E, kPanel) * block);
    args.dy_t = room(dy_t, args.dw2, Eo * args.dy_t_ld);
    args.dp = args.dg = Slices(block, F);
    args.dp.data = room(dp, true, args.dp.elements(F));
    args.dg.data = room(dg, args.gated, args.dg.elements(F));
    const bool copies = wide && !args.bf16_tiles;
    args.x_rows_ld = copies ? E : args.x_stride_m;
    args.dy_rows_ld = copies ? Eo : args.dy_stride_m;
    if (copies) {
      args.x_rows = room(x_rows, !args.preact, block * E);
      args.dy_rows = room(dy_rows, true, block * Eo);
    }
    if (wide) args.dx_sum = room(dx_sum, args.dx, block * E);
    args.own_sums = wide && args.M <= block;
    const auto sums = [&](at::Tensor& owner, void* gradient, int64_t elements) {
      return wide ? room(owner, gradient && !args.own_sums, elements) : gradient;
    };
    args.dw1_sum = sums(dw1_sum, args.dw1, F * E);
    args.dw2_sum = sums(dw2_sum, args.dw2, Eo * F);
    args.dgate_sum = sums(dgate_sum, args.dgate, F * E);
    db1_sum = at::empty({args.db1 ? args.biases() : 0}, x.options().dtype(at::kDouble));
    args.db1_sum = db1_sum.mutable_data_ptr<double>();
  }

  void* room(at::Tensor& owner, bool needed, int64_t elements) const {
    if (!needed) return nullptr;
    owner = at::empty({elements}, options);
    return owner.mutable_data_ptr();
  }

  void store(const at::Tensor& dw1, const at::Tensor& db1, const at::Tensor& dw2,
             const at::Tensor& dgate) const {
    if (db1.numel()) db1.copy_(db1_sum);
    if (dw1_sum.defined()) dw1.copy_(dw1_sum.view(dw1.sizes()));
    if (dw2_sum.defined()) dw2.copy_(dw2_sum.view(dw2.sizes()));
    if (dgate_sum.defined()) dgate.copy_(dgate_sum.view(dgate.sizes()));
  }
};

void run(FfnBwd& args, DType dtype, bool wide, const at::TensorOptions& options) {
  const int64_t threads = at::get_num_threads(), room = ffn_bwd_scratch(args);
  const int64_t chunks = ceil_div(args.F, args.chunk);
  const int64_t item = dtype == DType::f64 ? 8 : 4;
  const at::Tensor scratch = at::empty({threads * room}, options);
  char* const base = static_cast<char*>(scratch.mutable_data_ptr());
  const auto place = [&](int64_t worker) { return base + worker * room * item; };
  for (int64_t row = 0; row < args.M; row += args.block) {
    const int64_t rows = std::min(args.block, args.M - row);
    if (!wide || args.bf16_tiles) {
      const int64_t stored = wide ? 2 : item;
      args.x_rows = static_cast<const char*>(args.x) + row * args.x_stride_m * stored;
      args.dy_rows = static_cast<const char*>(args.dy) + row * args.dy_stride_m * stored;
    }
    if (!wide && args.dx) args.dx_sum = static_cast<char*>(args.dx) + row * args.E * item;
    const int64_t strips = ceil_div(rows, 64);
    for_tasks(strips, std::min(strips, threads), [&](int64_t strip, int64_t) {
      TFM_KERNEL(ffn_bwd_prepare)(args, dtype, row, strip * 64, std::min(rows, strip * 64 + 64));
    });
    for_tasks(chunks, std::min(chunks, threads), [&](int64_t chunk, int64_t worker) {
      TFM_KERNEL(ffn_bwd_hidden)(args, dtype, row, rows, chunk * args.chunk, place(worker));
    });
    if (!args.dx) continue;
    // Every task packs the weights of its columns, so that rows are parted only where columns alone
    // would let threads wait.
    const int64_t groups = ceil_div(rows, 16), panels = ceil_div(args.E, kPanel);
    const int64_t across = std::clamp<int64_t>(threads, 1, std::max<int64_t>(panels, 1));
    const int64_t least = std::min(groups, ceil_div(threads, across));
    const int64_t down =
        panels % threads == 0 ? 1 : std::clamp(rows / 256, least, ceil_div(4 * threads, across));
    const int64_t tasks = across * down;
    for_tasks(tasks, std::min(tasks, threads), [&](int64_t task, int64_t worker) {
      const int64_t i = task / across, j = task % across;
      const int64_t begin = groups * i / down * 16, end = groups * (i + 1) / down * 16;
      const int64_t first = panels * j / across * kPanel;
      const int64_t last = panels * (j + 1) / across * kPanel;
      TFM_KERNEL(ffn_bwd_input)
      (args, dtype, row, begin, std::min(rows, end), first, std::min(args.E, last), place(worker));
    });
  }
}

static_assert(kFfnBwdFewRows <= kFewRows, "preact is there, saved or computed again");

// A task of `hidden`: up to 512 features, whose products stay in L1 and L2.
void run_few_rows(FfnBwd& args, DType dtype, const at::Tensor& x, const at::Tensor& dy) {
  const auto wide = x.options().dtype(compute_type(x.scalar_type()));
  const at::Tensor x_rows = x.to(wide), dy_rows = dy.to(wide);
  args.x_rows = x_rows.const_data_ptr();
  args.dy_rows = dy_rows.const_data_ptr();
  args.x_rows_ld = x_rows.stride(0);
  args.dy_rows_ld = dy_rows.stride(0);
  args.dp = args.dg = Slices(args.M, args.F, args.F);
  const int64_t threads = at::get_num_threads();
  const int64_t chunk =
      std::clamp<int64_t>(round_up(ceil_div(args.F, threads), kPanel), kPanel, 512);
  const int64_t room = ffn_bwd_few_rows_scratch(args, chunk, args.E),
                held = args.dp.elements(args.F);
  const Workspace workspace(x, (args.gated ? 2 : 1) * held, threads * room);
  args.dp.data = workspace.first(0);
  args.dg.data = args.gated ? workspace.first(held) : nullptr;
  const int64_t chunks = ceil_div(args.F, chunk);
  for_tasks(chunks, std::min(chunks, threads), [&](int64_t task, int64_t worker) {
    const int64_t begin = task * chunk;
    TFM_KERNEL(ffn_bwd_few_rows_hidden)
    (args, dtype, begin, std::min(args.F, begin + chunk), workspace.second(worker * room));
  });
  if (!args.dx) return;
  for_strips(args.E, threads, [&](int64_t first, int64_t last, int64_t worker) {
    TFM_KERNEL(ffn_bwd_few_rows_input)
    (args, dtype, first, last, workspace.second(worker * room));
  });
}

// The limit is at::sum's own: below it threads cost more than they save.
void sum_rows(const FfnBwd& args, DType dtype) {
  const int64_t strips = ceil_div(args.Eo, kFfnBiasColumns);
  const int64_t threads = args.M * args.Eo < 32768 ? 1 : at::get_num_threads();
  for_tasks(strips, std::min(strips, threads), [&](int64_t strip, int64_t) {
    const int64_t first = strip * kFfnBiasColumns;
    TFM_KERNEL(ffn_bwd_db2)(args, dtype, first, std::min(args.Eo, first + kFfnBiasColumns));
  });
}

using SixTensors =
    std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

SixTensors ffn_bwd_cpu(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& w1,
                       const OptionalTensor& b1, const at::Tensor& w2, const OptionalTensor& gate,
                       const at::Tensor& preact, int64_t activation, double dropout_p,
                       const OptionalTensor& seed, const OptionalTensor& dropout_rows, bool need_x,
                       bool need_w1, bool need_b1, bool need_w2, bool need_b2, bool need_gate) {
  constexpr const char* kOp = "ffn_bwd_cpu";
  const FfnShape shape(x, w1, b1, w2, gate, activation, kOp);
  const auto M = shape.M, E = shape.E, F = shape.F, Eo = shape.Eo;
  check_shape(dy, {M, Eo}, kOp, "dy");
  TORCH_CHECK(dy.scalar_type() == x.scalar_type() && preact.scalar_type() == x.scalar_type(), kOp,
              ": dy and preact must have the dtype of x");
  if (preact.dim() == 2) check_shape(preact, {M, gate ? 2 * F : F}, kOp, "preact");
  TORCH_CHECK(gate || !need_gate, kOp, ": need_gate must be False without a gate");

  const auto options = x.options();
  const auto result = [&](bool needed, at::IntArrayRef sizes) {
    return needed ? new_output(sizes, options) : at::empty({0}, options);
  };
  at::Tensor dx = result(need_x, {M, E}), dw1 = result(need_w1, {F, E}),
             db1 = result(need_b1, {shape.gate_biased ? 2 * F : F}), dw2 = result(need_w2, {Eo, F}),
             db2 = result(need_b2, {Eo}), dgate = result(need_gate, {F, E});
  if (M == 0) {
    for (const at::Tensor& t : {dw1, db1, dw2, db2, dgate}) t.zero_();
    return {dx, dw1, db1, dw2, db2, dgate};
  }
  const DType dtype = dtype_of(x.scalar_type());
  const at::Tensor dy_rows = unit_rows(dy);
  FfnBwd args{};
  args.dy = dy_rows.const_data_ptr();
  args.dy_stride_m = dy_rows.stride(0);
  args.M = M;
  args.Eo = Eo;
  if (need_b2) {
    args.db2 = db2.mutable_data_ptr();
    sum_rows(args, dtype);
  }
  if (!(need_x || need_w1 || need_b1 || need_w2 || need_gate))
    return {dx, dw1, db1, dw2, db2, dgate};
  const at::Tensor x_rows = unit_rows(x), w1c = w1.contiguous(), w2c = w2.contiguous();
  // of few rows it is small, and the forward has kernels of its own for them
  const bool again = preact.dim() != 2 && M <= kFewRows;
  const at::Tensor preactc =
      again ? ffn_preact_cpu(x, w1, b1, w2, gate, activation) : preact.contiguous();
  const OptionalTensor b1c = contiguous(b1), gatec = contiguous(gate);

  args.x = x_rows.const_data_ptr();
  args.w1 = w1c.const_data_ptr();
  args.w2 = w2c.const_data_ptr();
  args.b1 = pointer(b1c);
  args.gate = pointer(gatec);
  args.gate_bias = shape.gate_bias(args.b1, x);
  args.preact = preactc.dim() == 2 ? preactc.const_data_ptr() : nullptr;
  args.dx = need_x ? dx.mutable_data_ptr() : nullptr;
  args.dw1 = need_w1 ? dw1.mutable_data_ptr() : nullptr;
  args.db1 = need_b1 ? db1.mutable_data_ptr() : nullptr;
  args.dw2 = need_w2 ? dw2.mutable_data_ptr() : nullptr;
  args.dgate = need_gate ? dgate.mutable_data_ptr() : nullptr;
  args.x_stride_m = x_rows.stride(0);
  args.E = E;
  args.F = F;
  args.gated = gate.has_value();
  args.bf16_tiles = takes_bf16_tiles(dtype, {E, F, Eo});
  args.activation = static_cast<Activation>(activation);
  args.dropout = check_dropout(dropout_p, seed, kOp);
  args.dropout_rows = check_rows(dropout_rows, M, kOp);
  if (M <= ffn_bwd_few_rows(args.bf16_tiles)) {
    run_few_rows(args, dtype, x_rows, dy_rows);
    return {dx, dw1, db1, dw2, db2, dgate};
  }
  pick_blocks(args, at::get_num_threads());
  const Memory memory(args, x);
  run(args, dtype, memory.wide, memory.options);
  memory.store(dw1, db1, dw2, dgate);
  return {dx, dw1, db1, dw2, db2, dgate};
}

TORCH_LIBRARY_IMPL(tfm_kernels, CPU, m) { m.impl("ffn_bwd_cpu", &ffn_bwd_cpu); }

}  // namespace
}  // namespace tfm_kernels
#endif
