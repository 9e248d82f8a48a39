// ffn_fwd, CPU. Implements FFN.1 to FFN.4 of tfm_kernels/ops/ffn.py.
// Owns:    one task = a tile of 16 to 256 rows and a segment of the hidden features, taken in
// chunks. Everything is held
//          transposed, (features, rows): x^T and y^T of the tile, h^T of the chunk, so that the
//          weights are the left operand as they lie in memory and are never packed, and the hidden
//          activation never leaves L2.
// Traffic: reads x (M*E), writes y (M*Eo) and preact (M*F) where asked; reads the weights once per
// tile, from L3.
//          4*M*E*F FLOPs, 6 with a gate.
// Limits:  none; float64 computes in float64 by plain loops, everything else in float32, with
//          bfloat16 products where the CPU has them.
// Config:  pick_tiling() below.
// Source:  own work.
#include "activation.h"
#include "ffn_tile.h"
#include "isa.h"
#include "philox.h"
#include "transpose.h"

namespace tfm_kernels {

struct FfnTiling {
  int64_t rows;      // per tile, a multiple of 16, at most kMaxTileRows
  int64_t tiles;     // ceil(M / rows)
  int64_t chunk;     // hidden features at a time, a multiple of 16
  int64_t segments;  // parts of the hidden features that are summed apart: more than 1 only where
                     // tiles < threads
};

struct FfnFwd {
  const void *x, *w1, *b1, *w2, *b2, *gate;  // b1, b2, gate may be null; weights contiguous
  void *y, *preact;                          // preact null where it is not wanted
  int64_t x_stride_m, M, E, F, Eo;
  bool gated;       // an empty gate has a null pointer
  bool bf16_tiles;  // bfloat16 is multiplied as it is stored
  Activation activation;
  Dropout dropout;
  const int64_t* dropout_rows;  // (M) or null
  FfnTiling tiling;
};

constexpr int64_t kMaxTileRows = 256;

// Elements of working memory that one task needs.
inline int64_t ffn_fwd_scratch(const FfnFwd& args) {
  const auto& tiling = args.tiling;
  // the hidden activation as an operand of bfloat16, or weights as they are widened
  const int64_t wide = args.bf16_tiles
                           ? tiling.chunk * tiling.rows / 2
                           : std::max<int64_t>(32768, 16 * std::max(args.E, tiling.chunk));
  return (args.E + (args.gated ? 2 : 1) * tiling.chunk) * tiling.rows + wide;
}

// Task (tile, segment) leaves its share of y^T, (Eo, rows), in `partial`; the join of a tile adds
// the segments' shares of columns begin..end - 1 in order and stores y.
TFM_DECLARE_KERNEL(void ffn_fwd(const FfnFwd& args, DType dtype, int64_t tile, int64_t segment,
                                void* partial, void* scratch))
TFM_DECLARE_KERNEL(void ffn_fwd_join(const FfnFwd& args, DType dtype, int64_t tile, int64_t begin,
                                     int64_t end, void* partials))

inline namespace CPU_CAPABILITY {
namespace {

// h (n, ld): adds b1, stores preact, and returns with FFN.3 done. `linear` holds the gate's
// product, or is null.
template <typename T, typename C = compute_t<T>>
void activate(const FfnFwd& args, int64_t row, int64_t rows, int64_t feature, int64_t n, int64_t ld,
              C* hidden, const C* linear) {
  if (args.b1) {
    const T* bias = static_cast<const T*>(args.b1) + feature;
    for (int64_t i = 0; i < n; ++i) {
      const C shift = static_cast<C>(bias[i]);
#pragma omp simd
      for (int64_t j = 0; j < ld; ++j) hidden[i * ld + j] += shift;
    }
  }
  if (args.preact) {
    const int64_t width = linear ? 2 * args.F : args.F;
    T* preact = static_cast<T*>(args.preact) + row * width + feature;
    transpose_narrow<T>(hidden, ld, rows, n, nullptr, preact, width);
    if (linear) transpose_narrow<T>(linear, ld, rows, n, nullptr, preact + args.F, width);
  }
  for_activation(args.activation, [&](auto act) {
#pragma omp simd
    for (int64_t j = 0; j < n * ld; ++j) hidden[j] = act.value(hidden[j]);
  });
  if (linear) {
#pragma omp simd
    for (int64_t j = 0; j < n * ld; ++j) hidden[j] *= linear[j];
  }
}

// Zeroes what the rule drops and scales the rest.
template <typename C>
void drop(const Dropout& dropout, const int64_t* rows, int64_t feature, int64_t n, int64_t ld,
          C* hidden) {
  if (dropout.bound > 0xFFFFFFFFu) return std::fill(hidden, hidden + n * ld, C(0));
  const uint32_t bound = static_cast<uint32_t>(dropout.bound);
  const C scale = static_cast<C>(dropout.scale);
  for (int64_t i = 0; i < n; i += 4) {
    const int64_t columns = std::min<int64_t>(4, n - i);
    for (int64_t j = 0; j < ld; j += kPhiloxCounters) {
      alignas(64) uint32_t draws[4][kPhiloxCounters];
      philox_columns(dropout.seed, rows + j, feature + i, draws);
      for (int64_t c = 0; c < columns; ++c) {
        C* h = hidden + (i + c) * ld + j;
#pragma omp simd
        for (int l = 0; l < kPhiloxCounters; ++l) {
          const C kept = h[l] * scale;
          h[l] = draws[c][l] >= bound ? kept : C(0);
        }
      }
    }
  }
}

template <typename T, typename O, typename C = compute_t<T>>
void run_task(const FfnFwd& args, int64_t tile, int64_t segment, C* y, C* scratch) {
  const auto& tiling = args.tiling;
  const int64_t E = args.E, F = args.F, Eo = args.Eo, ld = tiling.rows;
  const int64_t row = tile * tiling.rows, rows = std::min(tiling.rows, args.M - row);
  C *hidden = scratch + E * ld, *linear = args.gated ? hidden + tiling.chunk * ld : nullptr;
  O* x = reinterpret_cast<O*>(scratch);
  C* wide = hidden + (args.gated ? 2 : 1) * tiling.chunk * ld;
  int64_t numbers[kMaxTileRows] = {};
  for (int64_t r = 0; r < rows; ++r)
    numbers[r] = args.dropout_rows ? args.dropout_rows[row + r] : row + r;

  turn_right(static_cast<const T*>(args.x) + row * args.x_stride_m, args.x_stride_m, rows, E, x, ld,
             ld);
  const int64_t chunks = (F + tiling.chunk - 1) / tiling.chunk;
  const int64_t first = chunks * segment / tiling.segments * tiling.chunk;
  const int64_t last = std::min(F, chunks * (segment + 1) / tiling.segments * tiling.chunk);
  if (first >= last) std::fill(y, y + Eo * ld, C(0));
  for (int64_t f = first; f < last; f += tiling.chunk) {
    const int64_t n = std::min(tiling.chunk, last - f);
    weights_product(n, ld, E, static_cast<const T*>(args.w1) + f * E, E, x, ld, hidden, ld, false,
                    wide);
    if (linear)
      weights_product(n, ld, E, static_cast<const T*>(args.gate) + f * E, E, x, ld, linear, ld,
                      false, wide);
    activate<T>(args, row, rows, f, n, ld, hidden, linear);
    if (args.dropout.active()) drop(args.dropout, numbers, f, n, ld, hidden);
    weights_product(Eo, ld, n, static_cast<const T*>(args.w2) + f, F,
                    as_right(hidden, n, ld, reinterpret_cast<O*>(wide)), ld, y, ld, f > first,
                    wide);
  }
}

template <typename T, typename C = compute_t<T>>
void join(const FfnFwd& args, int64_t tile, int64_t begin, int64_t end, C* partials) {
  const int64_t ld = args.tiling.rows, Eo = args.Eo;
  const int64_t row = tile * ld, rows = std::min(ld, args.M - row);
  C* sum = partials + begin * ld;
  for (int64_t segment = 1; segment < args.tiling.segments; ++segment) {
    const C* part = sum + segment * Eo * ld;
#pragma omp simd
    for (int64_t j = 0; j < (end - begin) * ld; ++j) sum[j] += part[j];
  }
  const T* bias = args.b2 ? static_cast<const T*>(args.b2) + begin : nullptr;
  transpose_narrow(sum, ld, rows, end - begin, bias, static_cast<T*>(args.y) + row * Eo + begin,
                   Eo);
}

}  // namespace

void ffn_fwd(const FfnFwd& args, DType dtype, int64_t tile, int64_t segment, void* partial,
             void* scratch) {
  for_operands(dtype, args.bf16_tiles, [&](auto zero, auto operand) {
    using C = compute_t<decltype(zero)>;
    run_task<decltype(zero), decltype(operand)>(args, tile, segment, static_cast<C*>(partial),
                                                static_cast<C*>(scratch));
  });
}

void ffn_fwd_join(const FfnFwd& args, DType dtype, int64_t tile, int64_t begin, int64_t end,
                  void* partials) {
  for_dtype(dtype, [&](auto zero) {
    join<decltype(zero)>(args, tile, begin, end, static_cast<compute_t<decltype(zero)>*>(partials));
  });
}

}  // namespace CPU_CAPABILITY
}  // namespace tfm_kernels

#ifdef CPU_CAPABILITY_DEFAULT
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <tuple>

#include "ffn.h"

namespace tfm_kernels {
namespace {

// Rows: 128 (64 and 256 gave 2 to 15 % less, E 384 to 1024, one core of a 2.5 GHz Cascade Lake), or
// 256 where bfloat16 tiles are so fast that reading the weights counts (128: 15 % less, one core of
// a 2.6 GHz Xeon with AMX), spread evenly over the threads. Features: up to 512 (256: 3 % less, 64:
// 15 %). Segments: only where there are fewer tiles than threads, since their shares of y cost
// memory and a second pass.
FfnTiling pick_tiling(int64_t M, int64_t F, bool bf16_tiles, int64_t threads) {
  FfnTiling tiling{};
  int64_t tiles = ceil_div(M, bf16_tiles ? kMaxTileRows : kMaxTileRows / 2);
  if (tiles >= threads) tiles = round_up(tiles, threads);
  tiling.rows = round_up(ceil_div(M, tiles), 16);
  tiling.tiles = ceil_div(M, tiling.rows);
  tiling.segments =
      std::clamp<int64_t>(threads / tiling.tiles, 1, std::max<int64_t>(1, ceil_div(F, 64)));
  const int64_t parts = tiling.segments * ceil_div(F, 512 * tiling.segments);
  tiling.chunk = std::max<int64_t>(16, round_up(ceil_div(F, std::max<int64_t>(parts, 1)), 16));
  return tiling;
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
  args.tiling = pick_tiling(M, F, args.bf16_tiles, at::get_num_threads());

  const auto& tiling = args.tiling;
  const int64_t tasks = tiling.tiles * tiling.segments;
  const int64_t workers = std::min<int64_t>(tasks, at::get_num_threads());
  const int64_t share = Eo * tiling.rows, room = ffn_fwd_scratch(args);
  const bool joined =
      tiling.segments == 1;  // then a task's share is the whole, and its own to store
  const Workspace workspace(x, (joined ? workers : tasks) * share, workers * room);
  at::parallel_for(0, workers, 1, [&](int64_t begin, int64_t end) {
    for (int64_t worker = begin; worker < end; ++worker) {
      for (int64_t task = tasks * worker / workers; task < tasks * (worker + 1) / workers; ++task) {
        const int64_t tile = task / tiling.segments, segment = task % tiling.segments;
        void* partial = workspace.first((joined ? worker : task) * share);
        TFM_KERNEL(ffn_fwd)(args, dtype, tile, segment, partial, workspace.second(worker * room));
        if (joined) TFM_KERNEL(ffn_fwd_join)(args, dtype, tile, 0, Eo, partial);
      }
    }
    gemm_release();
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
  return {y, preact};
}

TORCH_LIBRARY_IMPL(tfm_kernels, CPU, m) { m.impl("ffn_fwd_cpu", &ffn_fwd_cpu); }

}  // namespace
}  // namespace tfm_kernels
#endif
