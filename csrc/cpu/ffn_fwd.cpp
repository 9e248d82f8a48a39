// ffn_fwd, CPU: the host. Implements FFN.1 to FFN.4 of tfm_kernels/ops/ffn.py with the kernels of
// ffn_fwd_tile.cpp and ffn_fwd_few_rows.cpp. Config:  pick_tiling() below. Source:  own work.
#include "ffn_fwd.h"

#ifdef CPU_CAPABILITY_DEFAULT
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <tuple>

#include "ffn.h"
#include "weights.h"

namespace tfm_kernels {
namespace {

// Rows: 128 (64 and 256 gave 2 to 15 % less, E 384 to 1024, one core of a 2.5 GHz Cascade Lake), or
// 256 where bfloat16 tiles are so fast that reading the weights counts (128: 15 % less, one core of
// a 2.6 GHz Xeon with AMX), spread evenly over the threads. Features: up to 512 (256: 3 % less, 64:
// 15 %). Segments: only where there are fewer tiles than threads, since their shares of y cost
// memory and a second pass.
FfnTiling pick_tiling(int64_t M, int64_t F, DType dtype, bool bf16_tiles, int64_t threads) {
  FfnTiling tiling{};
  tiling.rows = tile_rows(M, bf16_tiles ? kMaxTileRows : kMaxTileRows / 2, threads);
  tiling.tiles = ceil_div(M, tiling.rows);
  tiling.panel = panel_rows(tiling.rows, dtype);
  tiling.segments =
      std::clamp<int64_t>(threads / tiling.tiles, 1, std::max<int64_t>(1, ceil_div(F, 64)));
  const int64_t parts = tiling.segments * ceil_div(F, 512 * tiling.segments);
  tiling.chunk = std::max<int64_t>(16, round_up(ceil_div(F, std::max<int64_t>(parts, 1)), 16));
  return tiling;
}

void run_tiles(FfnFwd& args, DType dtype, const at::Tensor& x) {
  args.tiling = pick_tiling(args.M, args.F, dtype, args.bf16_tiles, at::get_num_threads());
  const auto& tiling = args.tiling;
  const int64_t Eo = args.Eo;
  const int64_t tasks = tiling.tiles * tiling.segments;
  const int64_t workers = std::min<int64_t>(tasks, at::get_num_threads());
  const int64_t share = Eo * tiling.rows, room = ffn_fwd_scratch(args);
  const bool joined =
      tiling.segments == 1;  // then a task's share is the whole, and its own to store
  const Workspace workspace(x, (joined ? workers : tasks) * share, workers * room);
  for_tasks(tasks, workers, [&](int64_t task, int64_t worker) {
    const int64_t tile = task / tiling.segments, segment = task % tiling.segments;
    void* partial = workspace.first((joined ? worker : task) * share);
    TFM_KERNEL(ffn_fwd)(args, dtype, tile, segment, partial, workspace.second(worker * room));
    if (joined) TFM_KERNEL(ffn_fwd_join)(args, dtype, tile, 0, Eo, partial);
  });
  if (!joined) {
    const int64_t strips = ceil_div(Eo, 64);
    at::parallel_for(0, tiling.tiles * strips, 4, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t tile = i / strips, column = i % strips * 64;
        TFM_KERNEL(ffn_fwd_join)(args, dtype, tile, column, std::min(Eo, column + 64),
                                 workspace.first(tile * tiling.segments * share));
      }
    });
  }
}

void run_few_rows(FfnFwd& args, DType dtype, const at::Tensor& x) {
  const int64_t workers = at::get_num_threads(), room = ffn_fwd_few_rows_scratch(args);
  const Workspace workspace(x, few_rows_operand_room(args.M, args.F), workers * room);
  args.hidden = workspace.first(0);
  for_strips(args.F, workers, [&](int64_t begin, int64_t end, int64_t worker) {
    TFM_KERNEL(ffn_fwd_few_rows_hidden)
    (args, dtype, begin, end, workspace.second(worker * room));
    gemm_release();
  });
  for_strips(args.Eo, workers, [&](int64_t begin, int64_t end, int64_t worker) {
    TFM_KERNEL(ffn_fwd_few_rows_out)(args, dtype, begin, end, workspace.second(worker * room));
    gemm_release();
  });
}

std::tuple<at::Tensor, at::Tensor> ffn_fwd_cpu(
    const at::Tensor& x, const at::Tensor& w1, const OptionalTensor& b1, const at::Tensor& w2,
    const OptionalTensor& b2, const OptionalTensor& gate, int64_t activation, double dropout_p,
    const OptionalTensor& seed, const OptionalTensor& dropout_rows, bool save_preact) {
  constexpr const char* kOp = "ffn_fwd_cpu";
  const FfnShape shape(x, w1, b1, w2, gate, activation, kOp);
  check_vector(b2, shape.Eo, x, kOp, "b2");
  const at::Tensor rows = unit_rows(x), w1c = w1.contiguous(), w2c = w2.contiguous();
  const OptionalTensor b1c = contiguous(b1), b2c = contiguous(b2), gatec = contiguous(gate);
  const auto M = shape.M, F = shape.F, Eo = shape.Eo;
  at::Tensor y = new_output({M, Eo}, x.options());
  at::Tensor preact =
      save_preact ? new_output({M, gate ? 2 * F : F}, x.options()) : at::empty({0}, x.options());
  if (M == 0) return {y, preact};

  const DType dtype = dtype_of(x.scalar_type());
  FfnFwd args{};
  args.x = rows.const_data_ptr();
  args.x_stride_m = rows.stride(0);
  args.w1 = w1c.const_data_ptr();
  args.w2 = w2c.const_data_ptr();
  args.b1 = pointer(b1c);
  args.b2 = pointer(b2c);
  args.gate = pointer(gatec);
  args.gate_bias = shape.gate_bias(args.b1, x);
  args.gated = gate.has_value();
  args.y = y.mutable_data_ptr();
  args.preact = save_preact ? preact.mutable_data_ptr() : nullptr;
  args.M = M;
  args.E = shape.E;
  args.F = F;
  args.Eo = Eo;
  args.bf16_tiles = takes_bf16_tiles(dtype, {shape.E, F, args.x_stride_m});
  args.activation = static_cast<Activation>(activation);
  args.dropout = check_dropout(dropout_p, seed, kOp);
  args.dropout_rows = check_rows(dropout_rows, M, kOp);
  if (M <= kFewRows)
    run_few_rows(args, dtype, x);
  else
    run_tiles(args, dtype, x);
  return {y, preact};
}

TORCH_LIBRARY_IMPL(tfm_kernels, CPU, m) { m.impl("ffn_fwd_cpu", &ffn_fwd_cpu); }

}  // namespace

at::Tensor ffn_preact_cpu(const at::Tensor& x, const at::Tensor& w1, const OptionalTensor& b1,
                          const at::Tensor& w2, const OptionalTensor& gate, int64_t activation) {
  const OptionalTensor none;
  return std::get<1>(ffn_fwd_cpu(x, w1, b1, w2, none, gate, activation, 0.0, none, none, true));
}

}  // namespace tfm_kernels
#endif
