// linear_fwd, CPU. Implements LINEAR.1 of tfm_kernels/ops/linear.py.
// Owns:    one task = a range of features of y, for up to 32 rows at a time; with more rows a tile
// of
//          them and up to 512 features, held transposed, (features, rows), as in ffn_fwd_tile.cpp.
// Traffic: reads the weights once for 32 rows, from L3 or memory, which is what it costs there; x
// and y stay in cache. With more rows once a tile. 2*M*K*N FLOPs.
// Limits:  none. Sums in float32, in float64 for float64; bfloat16 products where the CPU has them,
// for 32 rows at a time.
// Source:  own work.
#include "few_rows.h"
#include "isa.h"
#include "weights.h"

namespace tfm_kernels {

struct LinearFwd {
  const void *x, *weight, *bias;  // bias may be null
  void* y;                        // contiguous
  int64_t x_stride_m, weight_stride_n, M, K, N;
  bool bf16_tiles;  // bfloat16 is multiplied as it is stored
  // Many rows: those of a tile and of a panel of it, multiples of 16, and features at a time.
  int64_t tile, panel, chunk;
};

// Elements of working memory that a task needs.
inline int64_t linear_fwd_scratch(const LinearFwd& args) {
  return few_rows_room(kFewRows) + few_rows_operand_room(kFewRows, args.K);
}

// Rows row..row + rows - 1, at most kFewRows, of features begin..end - 1.
TFM_DECLARE_KERNEL(void linear_fwd(const LinearFwd& args, DType dtype, int64_t row, int64_t rows,
                                   int64_t begin, int64_t end, void* scratch))

// The tile of rows that begins at `row`, features begin..end - 1.
TFM_DECLARE_KERNEL(void linear_fwd_tile(const LinearFwd& args, DType dtype, int64_t row,
                                        int64_t begin, int64_t end, void* scratch))

// Elements of working memory that this takes: x^T and y^T of a panel, weights as they are widened.
inline int64_t linear_fwd_tile_scratch(const LinearFwd& args) {
  return (args.K + args.chunk) * args.panel + widened_room(args.K);
}

inline namespace CPU_CAPABILITY {
namespace {

template <typename T, typename C = compute_t<T>>
void tile(const LinearFwd& args, int64_t row, int64_t begin, int64_t end, C* x) {
  const int64_t K = args.K, N = args.N, w_ld = args.weight_stride_n;
  C *y = x + K * args.panel, *wide = y + args.chunk * args.panel;
  const T* bias = args.bias ? static_cast<const T*>(args.bias) + begin : nullptr;
  const int64_t longest = longest_bare_sum<T>(args.panel);
  for_panels(args.tile, args.panel, args.M - row, [&](int64_t p, int64_t ld, int64_t real) {
    turn_right(static_cast<const T*>(args.x) + (row + p) * args.x_stride_m, args.x_stride_m, real,
               K, x, ld, ld);
    weights_product(end - begin, ld, K, static_cast<const T*>(args.weight) + begin * w_ld, w_ld, x,
                    ld, y, ld, false, wide, longest);
    transpose_narrow(y, ld, real, end - begin, bias,
                     static_cast<T*>(args.y) + (row + p) * N + begin, N);
  });
}

}  // namespace

void linear_fwd(const LinearFwd& args, DType dtype, int64_t row, int64_t rows, int64_t begin,
                int64_t end, void* scratch) {
  for_operands(dtype, args.bf16_tiles, [&](auto zero, auto operand) {
    using T = decltype(zero);
    using C = compute_t<T>;
    using O = decltype(operand);
    C* room = static_cast<C*>(scratch);
    int64_t x_ld = args.x_stride_m;
    const O* x = few_rows_operand(static_cast<const T*>(args.x) + row * x_ld, rows, args.K,
                                  reinterpret_cast<O*>(room + few_rows_room(kFewRows)), x_ld);
    few_rows_linear(begin, end, rows, args.K, x, x_ld, static_cast<const T*>(args.weight),
                    args.weight_stride_n, static_cast<const T*>(args.bias),
                    static_cast<T*>(args.y) + row * args.N, args.N, room);
  });
}

void linear_fwd_tile(const LinearFwd& args, DType dtype, int64_t row, int64_t begin, int64_t end,
                     void* scratch) {
  for_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    tile<T>(args, row, begin, end, static_cast<compute_t<T>*>(scratch));
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

// Tiles and panels of rows as ffn_fwd takes them.
void run_tiles(LinearFwd& args, DType dtype, const at::Tensor& x) {
  const TileGrid grid(args.M, args.N, kMaxTileRows / 2, 16, at::get_num_threads());
  args.tile = grid.tile;
  args.panel = panel_rows(grid.tile, dtype);
  args.chunk = grid.chunk;
  const int64_t room = linear_fwd_tile_scratch(args);
  const Workspace workspace(x, grid.workers * room, 0);
  for_tasks(grid.tasks, grid.workers, [&](int64_t task, int64_t worker) {
    const auto [row, begin, end] = grid.place(task);
    TFM_KERNEL(linear_fwd_tile)(args, dtype, row, begin, end, workspace.first(worker * room));
  });
}

}  // namespace

at::Tensor linear_fwd_cpu(const at::Tensor& x, const at::Tensor& weight,
                          const OptionalTensor& bias) {
  constexpr const char* kOp = "linear_fwd_cpu";
  check_floating(x, kOp, "x");
  TORCH_CHECK(x.dim() == 2 && weight.dim() == 2, kOp, ": x and weight must have 2 dimensions");
  const int64_t M = x.size(0), K = x.size(1), N = weight.size(0);
  check_shape(weight, {N, K}, kOp, "weight");
  TORCH_CHECK(weight.scalar_type() == x.scalar_type(), kOp, ": weight must have the dtype of x");
  check_vector(bias, N, x, kOp, "bias");
  at::Tensor y = new_output({M, N}, x.options());
  const at::Tensor rows = unit_rows(x), features = unit_rows(weight);
  const OptionalTensor shift = contiguous(bias);

  LinearFwd args{};
  args.x = rows.const_data_ptr();
  args.weight = features.const_data_ptr();
  args.bias = pointer(shift);
  args.y = y.mutable_data_ptr();
  args.x_stride_m = rows.stride(0);
  args.weight_stride_n = features.stride(0);
  args.M = M;
  args.K = K;
  args.N = N;
  const DType dtype = dtype_of(x.scalar_type());
  args.bf16_tiles = takes_bf16_tiles(dtype, {K, args.x_stride_m});
  if (M > kFewRows && !args.bf16_tiles) {
    run_tiles(args, dtype, x);
    return y;
  }
  const int64_t workers = at::get_num_threads(), room = linear_fwd_scratch(args);
  const Workspace workspace(x, workers * room, 0);
  for_strips(N, workers, [&](int64_t begin, int64_t end, int64_t worker) {
    for (int64_t row = 0; row < M; row += kFewRows)
      TFM_KERNEL(linear_fwd)(args, dtype, row, std::min(kFewRows, M - row), begin, end,
                             workspace.first(worker * room));
    gemm_release();
  });
  return y;
}

TORCH_LIBRARY_IMPL(tfm_kernels, CPU, m) { m.impl("linear_fwd_cpu", &linear_fwd_cpu); }

}  // namespace tfm_kernels
#endif
