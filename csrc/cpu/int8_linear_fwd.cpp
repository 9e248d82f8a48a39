// int8_linear_fwd, CPU. Implements INT8_LINEAR.1 and .2 of tfm_kernels/ops/int8_linear.py.
// Owns:    one task = a range of features of y for up to 32 rows at a time, or a tile of more rows
//          and up to 512 features; dynamic: rows of x are rounded first, in panels of 32, or, of
//          many rows in AMX's tiles, as they lie, and the weights are packed.
// Traffic: reads the weights, a byte each, once for 32 rows, from L3 or memory; with more rows once
//          a tile. x once, dynamic its integers once for every strip of features. 2*M*K*N
//          operations, dynamic in int32, exactly.
// Limits:  none. Sums in float32, in float64 for float64.
// Source:  own work.
#include "int8_products.h"
#include "int8_rounding.h"
#include "isa.h"
#include "weights.h"

namespace tfm_kernels {

struct Int8LinearFwd {
  const void *x, *bias;  // bias may be null
  const int8_t* weight;
  const float* scale;
  void* y;  // contiguous
  int64_t x_stride_m, weight_stride_n, M, K, N;
  bool bf16_tiles;  // bfloat16 is multiplied as it is stored, with weights as bfloat16, exactly
  int64_t tile, panel, chunk;  // rows of a tile, of a panel of it, features at a time
  // Dynamic: the rounded rows of x, `filled` integers each, and the steps of these rows.
  void *integers, *step;
  int64_t filled;
  IntegerUnit unit;
  bool turned;         // rows lie in panels, and weights as they are
  const void* packed;  // or, in tiles of many rows, rows lie as they are, and weights in panels
};

// Few rows of features begin..end - 1: all of M, at most kFewRows.
TFM_DECLARE_KERNEL(void int8_linear_fwd(const Int8LinearFwd& args, DType dtype, int64_t begin,
                                        int64_t end, void* scratch))

// Elements of working memory that this takes.
inline int64_t int8_linear_fwd_scratch(const Int8LinearFwd& args) {
  return few_rows_room(kFewRows) + few_rows_operand_room(kFewRows, args.K);
}

// The tile of rows that begins at `row`, features begin..end - 1.
TFM_DECLARE_KERNEL(void int8_linear_fwd_tile(const Int8LinearFwd& args, DType dtype, int64_t row,
                                             int64_t begin, int64_t end, void* scratch))

// Elements of working memory that this takes: x^T and y^T of a panel, weights as they are widened.
inline int64_t int8_linear_fwd_tile_scratch(const Int8LinearFwd& args) {
  return (args.K + args.chunk) * args.panel + widened_room(args.K);
}

// Rounds a panel of rows, the panel'th of x.
TFM_DECLARE_KERNEL(void int8_linear_round(const Int8LinearFwd& args, DType dtype, int64_t panel,
                                          void* scratch))

inline int64_t int8_linear_round_scratch(const Int8LinearFwd& args) {
  return args.K + kPanelRows * args.filled;
}

// Packs a panel of features, the panel'th of the weights, into `packed`. It needs as much working
// memory, in bytes, as it writes.
TFM_DECLARE_KERNEL(void int8_linear_pack(const Int8LinearFwd& args, int64_t panel, int8_t* packed,
                                         int8_t* scratch))

// The product of rounded rows: those of the tile that begins at `row`, features begin..end - 1, of
// packed ones whole panels. The working memory is for sums.
TFM_DECLARE_KERNEL(void int8_linear_fwd_integers(const Int8LinearFwd& args, DType dtype,
                                                 int64_t row, int64_t begin, int64_t end,
                                                 void* scratch))

inline int64_t int8_linear_fwd_integers_scratch(const Int8LinearFwd& args) {
  return std::max(kFewRowsStrip * round_up(args.tile, kPanelRows), kPackedRows * kPanelRows);
}

inline namespace CPU_CAPABILITY {
namespace {

// Rows f of y^T (n, ld) times scale[f].
template <typename C>
void scale_features(int64_t n, int64_t ld, const float* scale, C* y) {
  for (int64_t f = 0; f < n; ++f) {
    const C factor = scale[f];
#pragma omp simd
    for (int64_t r = 0; r < ld; ++r) y[f * ld + r] *= factor;
  }
}

void widen_weights(const int8_t* in, int64_t n, float* out) { widen(in, n, out); }
void widen_weights(const int8_t* in, int64_t n, double* out) { std::copy_n(in, n, out); }
void widen_weights(const int8_t* in, int64_t n, bf16_t* out) {
  // every integer of 8 bits is a bfloat16: the upper half of its float32
  uint16_t* bits = reinterpret_cast<uint16_t*>(out);
#pragma omp simd
  for (int64_t i = 0; i < n; ++i)
    bits[i] = static_cast<uint16_t>(std::bit_cast<uint32_t>(static_cast<float>(in[i])) >> 16);
}

// C (m, n) = A (m, k) B (k, n); the integers A are widened block by block into `wide`.
template <typename O, typename C>
void widened_product(int64_t m, int64_t n, int64_t k, const int8_t* a, int64_t lda, const O* b,
                     C* c, O* wide, int64_t longest) {
  const int64_t step = widened_rows(k);
  for (int64_t i = 0; i < m; i += step) {
    const int64_t rows = std::min(step, m - i);
    for (int64_t r = 0; r < rows; ++r) widen_weights(a + (i + r) * lda, k, wide + r * k);
    product(rows, n, k, wide, k, b, n, c + i * n, n, false, longest);
  }
}

template <typename T, typename O, typename C = compute_t<T>>
void tile(const Int8LinearFwd& args, int64_t row, int64_t begin, int64_t end, C* room) {
  const int64_t K = args.K, N = args.N;
  C *y = room + K * args.panel, *wide = y + args.chunk * args.panel;
  O* x = reinterpret_cast<O*>(room);
  const T* bias = args.bias ? static_cast<const T*>(args.bias) + begin : nullptr;
  for_panels(args.tile, args.panel, args.M - row, [&](int64_t p, int64_t ld, int64_t real) {
    turn_right(static_cast<const T*>(args.x) + (row + p) * args.x_stride_m, args.x_stride_m, real,
               K, x, ld, ld);
    widened_product(end - begin, ld, K, args.weight + begin * args.weight_stride_n,
                    args.weight_stride_n, x, y, reinterpret_cast<O*>(wide),
                    longest_bare_sum<T>(args.panel));
    scale_features(end - begin, ld, args.scale + begin, y);
    transpose_narrow(y, ld, real, end - begin, bias,
                     static_cast<T*>(args.y) + (row + p) * N + begin, N);
  });
}

}  // namespace

void int8_linear_fwd(const Int8LinearFwd& args, DType dtype, int64_t begin, int64_t end,
                     void* scratch) {
  for_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    if constexpr (!std::is_same_v<T, double>) {  // which goes by tiles
      float* room = static_cast<float*>(scratch);
      const int64_t rows = args.M, ld = round_up(rows, 16);
      int64_t x_ld = args.x_stride_m;
      const float* x = few_rows_operand(static_cast<const T*>(args.x), rows, args.K,
                                        room + few_rows_room(kFewRows), x_ld);
      few_rows_strips(begin, end, rows, static_cast<const T*>(args.bias), static_cast<T*>(args.y),
                      args.N, room, [&](int64_t f, int64_t n) {
                        few_rows_product(n, rows, args.K, args.weight + f * args.weight_stride_n,
                                         args.weight_stride_n, x, x_ld, room, ld);
                        scale_features(n, ld, args.scale + f, room);
                      });
    }
  });
}

void int8_linear_fwd_tile(const Int8LinearFwd& args, DType dtype, int64_t row, int64_t begin,
                          int64_t end, void* scratch) {
  for_operands(dtype, args.bf16_tiles, [&](auto zero, auto operand) {
    using T = decltype(zero);
    tile<T, decltype(operand)>(args, row, begin, end, static_cast<compute_t<T>*>(scratch));
  });
}

void int8_linear_round(const Int8LinearFwd& args, DType dtype, int64_t panel, void* scratch) {
  for_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    using C = compute_t<T>;
    for_integers(args.unit, [&](auto how) {
      using P = decltype(how);
      using E = typename P::E;
      const int64_t row = panel * kPanelRows, rows = std::min(kPanelRows, args.M - row);
      const T* x = static_cast<const T*>(args.x) + row * args.x_stride_m;
      C *wide = static_cast<C*>(scratch), *step = static_cast<C*>(args.step) + row;
      E* integers = static_cast<E*>(args.integers) + row * args.filled;
      E* flat = args.turned ? reinterpret_cast<E*>(wide + args.K) : integers;
      round_rows<P>(x, args.x_stride_m, rows, args.K, args.filled, wide, flat, step);
      if (args.turned) turn_panel<P>(flat, rows, args.filled, integers);
    });
  });
}

void int8_linear_pack(const Int8LinearFwd& args, int64_t panel, int8_t* packed, int8_t* scratch) {
  for_integers(args.unit, [&](auto how) {
    using P = decltype(how);
    if constexpr (P::kTiles) {
      const int64_t feature = panel * kPanelRows, n = std::min(kPanelRows, args.N - feature);
      for (int64_t f = 0; f < n; ++f) {
        int8_t* row = scratch + f * args.filled;
        std::copy_n(args.weight + (feature + f) * args.weight_stride_n, args.K, row);
        std::fill(row + args.K, row + args.filled, int8_t(0));
      }
      turn_panel<P>(scratch, n, args.filled, packed + feature * args.filled);
    }
  });
}

void int8_linear_fwd_integers(const Int8LinearFwd& args, DType dtype, int64_t row, int64_t begin,
                              int64_t end, void* scratch) {
  for_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    using C = compute_t<T>;
    for_integers(args.unit, [&](auto how) {
      using P = decltype(how);
      const int64_t rows = std::min(args.tile, args.M - row);
      const auto* x = static_cast<const typename P::E*>(args.integers) + row * args.filled;
      const C* step = static_cast<const C*>(args.step) + row;
      const T* bias = static_cast<const T*>(args.bias);
      T* y = static_cast<T*>(args.y) + row * args.N;
      int32_t* sums = static_cast<int32_t*>(scratch);
      if constexpr (P::kTiles)
        if (args.packed)
          return packed_linear(begin, end, rows, static_cast<const int8_t*>(args.packed), x,
                               args.filled, step, args.scale, bias, y, args.N, sums);
      integer_linear<P>(begin, end, rows, args.K, args.weight, args.weight_stride_n, x, args.filled,
                        args.turned, step, args.scale, bias, y, args.N, sums);
    });
  });
}

}  // namespace CPU_CAPABILITY
}  // namespace tfm_kernels

#ifdef CPU_CAPABILITY_DEFAULT
#include <ATen/Parallel.h>
#include <torch/library.h>

#include "operators.h"
#include "rows.h"

namespace tfm_kernels {
namespace {

// Weights that are widened: few rows of x where they lie, else tiles of rows.
void run_widened(Int8LinearFwd& args, DType dtype, const at::Tensor& x) {
  const int64_t threads = at::get_num_threads();
  args.bf16_tiles = takes_bf16_tiles(dtype, {args.K, args.x_stride_m});
  const bool outruns = !args.bf16_tiles || outruns_bf16_tiles(args.M);
  if (args.M <= kFewRows && outruns && dtype != DType::f64) {
    const int64_t room = int8_linear_fwd_scratch(args);
    const Workspace workspace(x, threads * room, 0);
    for_strips(args.N, threads, [&](int64_t begin, int64_t end, int64_t worker) {
      TFM_KERNEL(int8_linear_fwd)(args, dtype, begin, end, workspace.first(worker * room));
    });
    return;
  }
  const TileGrid grid(args.M, args.N, kMaxTileRows / 2, 16, threads);
  args.tile = grid.tile;
  args.panel = panel_rows(grid.tile, dtype);
  args.chunk = grid.chunk;
  const int64_t room = int8_linear_fwd_tile_scratch(args);
  const Workspace workspace(x, grid.workers * room, 0);
  for_tasks(grid.tasks, grid.workers, [&](int64_t task, int64_t worker) {
    const auto [row, begin, end] = grid.place(task);
    TFM_KERNEL(int8_linear_fwd_tile)
    (args, dtype, row, begin, end, workspace.first(worker * room));
  });
}

// Whether panels of weights pay for themselves: making them takes as long as K rows gain by it,
// none of which is turned, nor its part of y (bfloat16 on a Xeon with AMX, two threads: 4096 rows
// of 384-1536 went from 2.9 ms to 2.4, 512 rows from 0.36 to 0.41, those of 768-3072 from 0.98
// to 1.28).
bool packs_weights(IntegerUnit unit, int64_t rows, int64_t width) {
  return unit == IntegerUnit::tiles && rows >= std::max<int64_t>(256, 2 * width);
}

// Rows that are rounded to integers first.
void run_integers(Int8LinearFwd& args, DType dtype, const at::Tensor& x) {
  const int64_t threads = at::get_num_threads();
  const int64_t panels = ceil_div(args.M, kPanelRows), features = ceil_div(args.N, kPanelRows);
  args.unit = integer_unit(args.M);
  args.filled = round_up(args.K, kIntegers);
  const bool packs = packs_weights(args.unit, args.M, args.K);
  args.turned = args.M > kDotRows && !packs;
  const auto bytes = [&](int64_t n) { return at::empty({n}, x.options().dtype(at::kByte)); };
  const int64_t panel_bytes = kPanelRows * args.filled;
  const at::Tensor integers = bytes(panels * panel_bytes * integer_bytes(args.unit));
  args.integers = integers.mutable_data_ptr();
  const at::Tensor packed =
      bytes(packs ? (features + std::min(features, threads)) * panel_bytes : 0);
  if (packs) {
    int8_t* weights = static_cast<int8_t*>(packed.mutable_data_ptr());
    for_tasks(features, std::min(features, threads), [&](int64_t task, int64_t worker) {
      TFM_KERNEL(int8_linear_pack)(args, task, weights,
                                   weights + (features + worker) * panel_bytes);
    });
    args.packed = weights;
  }

  const TileGrid grid(args.M, args.N, kMaxTileRows, kPanelRows, threads);
  args.tile = grid.tile;
  const int64_t rounding = int8_linear_round_scratch(args);
  const int64_t room = std::max(rounding, int8_linear_fwd_integers_scratch(args));
  const Workspace workspace(x, threads * room, panels * kPanelRows);
  args.step = workspace.second(0);
  for_tasks(panels, std::min(panels, threads), [&](int64_t panel, int64_t worker) {
    TFM_KERNEL(int8_linear_round)(args, dtype, panel, workspace.first(worker * room));
  });
  for_tasks(grid.tasks, grid.workers, [&](int64_t task, int64_t worker) {
    const auto [row, begin, end] = grid.place(task);
    TFM_KERNEL(int8_linear_fwd_integers)
    (args, dtype, row, begin, end, workspace.first(worker * room));
  });
}

}  // namespace

at::Tensor int8_linear_fwd_cpu(const at::Tensor& x, const at::Tensor& weight,
                               const at::Tensor& scale, const OptionalTensor& bias, bool dynamic) {
  constexpr const char* kOp = "int8_linear_fwd_cpu";
  check_floating(x, kOp, "x");
  TORCH_CHECK(x.dim() == 2 && weight.dim() == 2, kOp, ": x and weight must have 2 dimensions");
  const int64_t M = x.size(0), K = x.size(1), N = weight.size(0);
  check_int8_weight(weight, scale, N, K, kOp, "weight");
  if (dynamic) check_integer_width(K, kOp, "x");
  check_vector(bias, N, x, kOp, "bias");
  at::Tensor y = new_output({M, N}, x.options());
  if (y.numel() == 0) return y;
  const at::Tensor rows = unit_rows(x), features = unit_rows(weight), steps = scale.contiguous();
  const OptionalTensor shift = contiguous(bias);

  Int8LinearFwd args{};
  args.x = rows.const_data_ptr();
  args.bias = pointer(shift);
  args.weight = features.const_data_ptr<int8_t>();
  args.scale = steps.const_data_ptr<float>();
  args.y = y.mutable_data_ptr();
  args.x_stride_m = rows.stride(0);
  args.weight_stride_n = features.stride(0);
  args.M = M;
  args.K = K;
  args.N = N;
  if (dynamic)
    run_integers(args, dtype_of(x.scalar_type()), x);
  else
    run_widened(args, dtype_of(x.scalar_type()), x);
  return y;
}

TORCH_LIBRARY_IMPL(tfm_kernels, CPU, m) { m.impl("int8_linear_fwd_cpu", &int8_linear_fwd_cpu); }

}  // namespace tfm_kernels
#endif
