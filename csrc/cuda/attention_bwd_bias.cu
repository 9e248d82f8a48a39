// dbias of attention, A.10: a launch of attention_bwd (attention_bwd.cu).
// Owns:    a block of four warps = a tile of pairs of one matrix of the bias, 16 queries a warp. It
//          makes dx again for every sequence and head that shares the matrix and, along an axis of
//          1, for every tile, one after another: every sum has a fixed order, and nothing but dbias
//          is stored.
// Cost:    two of the backward's five products once more.
// Config:  PairsShape of attention_bwd_tile.cuh; timed on an H200: 1.3 to 3 times Triton's.
// Source:  own work.
#include "attention_bwd.h"

#ifdef TFM_KERNEL_HALF
#include "attention_bwd_tile.cuh"

namespace tfm_kernels {
namespace {

// totals += dx of one head's tile. All threads call.
template <typename T, int width, int kN>
__device__ void add_tile(const AttentionBwd& args, int64_t b, int64_t h, int m0, int n0,
                         float (&totals)[1][kN][4]) {
  using Shape = PairsShape<sizeof(T), width>;
  constexpr int kStride = kTileStride<T, width>, kRows = Shape::kRows, kKeys = Shape::kKeys;
  const Attention& call = args.call;
  const Sequence s = sequence_of(call, b);
  const Met met = keys_met(s, m0, kRows);
  if (m0 >= s.tq || n0 >= met.end || n0 + kKeys <= met.begin) return;
  const HeadOfCall head(call, s, b, h);
  const int64_t kv = h / call.group;
  T *q_tile = reinterpret_cast<T*>(shared_floats()), *dout_tile = q_tile + kRows * kStride;
  T *k_tile = dout_tile + kRows * kStride, *v_tile = k_tile + kKeys * kStride;
  copy_rows<kRows, width>(q_tile, call.q, rows_of<T>(call.q, b, h, 0), m0, m0, s.tq, call.d);
  copy_rows<kRows, width>(dout_tile, args.dout, rows_of<T>(args.dout, b, h, 0), m0, m0, s.tq,
                          call.dv);
  copy_rows<kKeys, width>(k_tile, call.k, rows_of<T>(call.k, b, kv, 0), n0, met.begin, met.end,
                          call.d);
  copy_rows<kKeys, width>(v_tile, call.v, rows_of<T>(call.v, b, kv, 0), n0, met.begin, met.end,
                          call.dv);
  copy_commit();
  copy_wait<0>();
  __syncthreads();  // the tiles are there
  const int mine = static_cast<int>(threadIdx.x) / kWarp * 16;
  if (m0 + mine < s.tq) {
    const RowNumbers* rows = reinterpret_cast<const RowNumbers*>(args.rows) +
                             b * call.lse_stride_b + h * call.lse_stride_h;
    float x[1][kN][4] = {}, products[1][kN][4] = {};
    add_dots<width>(x, q_tile + mine * kStride, k_tile, call.d);
    add_dots<width>(products, dout_tile + mine * kStride, v_tile, call.dv);
    score<T, false>(call, head, m0 + mine, n0, x);
    differentiate_all<false>(call, head, rows, m0 + mine, n0, x, products);
#pragma unroll
    for (int i = 0; i < 4 * kN; ++i) totals[0][i / 4][i % 4] += products[0][i / 4][i % 4];
  }
  __syncthreads();  // nobody reads the tiles any more
}

// The sum over the block's rows of each of its columns, in every warp's lanes of row 0.
template <int warps, int kN>
__device__ void add_up_rows(float (&totals)[1][kN][4]) {
  float* memory = shared_floats();  // (warps, 8 kN)
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
#pragma unroll
  for (int i = 0; i < 2 * kN; ++i) {
    float sum = totals[0][i / 2][i % 2] + totals[0][i / 2][2 + i % 2];
#pragma unroll
    for (int offset = 4; offset < kWarp; offset *= 2)
      sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    if (lane_row() == 0) memory[warp * 8 * kN + i / 2 * 8 + lane_column() + i % 2] = sum;
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 2 * kN; ++i) {
    float sum = 0.0f;
    for (int other = 0; other < warps; ++other)
      sum += memory[other * 8 * kN + i / 2 * 8 + lane_column() + i % 2];
    totals[0][i / 2][i % 2] = sum;
  }
}

template <typename T, int width>
__global__ void __launch_bounds__(PairsShape<sizeof(T), width>::kWarps* kWarp, 1)
    attention_bwd_bias_kernel(const AttentionBwd args) {
  using Shape = PairsShape<sizeof(T), width>;
  constexpr int kN = Shape::kN, kRows = Shape::kRows, kKeys = Shape::kKeys;
  const Attention& call = args.call;
  const bool per_row = args.bias_q > 1, per_column = args.bias_k > 1;
  const int across = (args.bias_q + kRows - 1) / kRows, along = (args.bias_k + kKeys - 1) / kKeys;
  const int64_t matrix = blockIdx.x / along / across;
  const int own_b = static_cast<int>(matrix / args.bias_h);
  const int own_h = static_cast<int>(matrix % args.bias_h);
  const int row = static_cast<int>(blockIdx.x) / along % across * kRows;
  const int column = static_cast<int>(blockIdx.x) % along * kKeys;
  float totals[1][kN][4] = {};
#pragma unroll 1
  for (int b = own_b; b < call.batch; b += args.bias_b)
#pragma unroll 1
    for (int h = own_h; h < call.heads; h += args.bias_h)
#pragma unroll 1
      for (int m0 = row; m0 < (per_row ? row + 1 : call.queries); m0 += kRows)
#pragma unroll 1
        for (int n0 = column; n0 < (per_column ? column + 1 : call.keys); n0 += kKeys)
          add_tile<T, width>(args, b, h, m0, n0, totals);

  const int mine = per_row ? static_cast<int>(threadIdx.x) / kWarp * 16 + lane_row() : 0;
  if (!per_column) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < 2 * kN; ++i) sum += totals[0][i / 2][half * 2 + i % 2];
      totals[0][0][half * 2] = row_sum(sum);
      totals[0][0][half * 2 + 1] = 0.0f;
    }
  }
  if (!per_row) add_up_rows<Shape::kWarps>(totals);
  const bool writes = (per_row || threadIdx.x < 4) && (per_column || lane_column() == 0);
  if (!writes) return;
  const int64_t first = matrix * args.bias_q * args.bias_k;
#pragma unroll
  for (int i = 0; i < 4 * kN; ++i) {
    const int at_row = row + mine + i % 4 / 2 * 8, at = column + i / 4 * 8 + lane_column() + i % 2;
    if (at_row >= args.bias_q || at >= args.bias_k || (!per_row && i % 4 > 1)) continue;
    const int64_t place = first + static_cast<int64_t>(at_row) * args.bias_k + at;
    const float total = totals[0][i / 4][i % 4];
    if (call.bias.type == DType::f32)
      static_cast<float*>(args.dbias)[place] = total;
    else
      static_cast<T*>(args.dbias)[place] = static_cast<T>(total);
  }
}

}  // namespace

const char* launch_bias(const AttentionBwd& args, Stream stream) {
  return for_shape(args.call, [&](auto zero, auto wide) {
    using T = decltype(zero);
    constexpr int kWidth = decltype(wide)::value;
    using Shape = PairsShape<sizeof(T), kWidth>;
    const int64_t across = (args.bias_q + Shape::kRows - 1) / Shape::kRows;
    const int64_t along = (args.bias_k + Shape::kKeys - 1) / Shape::kKeys;
    const int shared =
        2 * (Shape::kRows + Shape::kKeys) * kTileStride<T, kWidth> * static_cast<int>(sizeof(T));
    return start(attention_bwd_bias_kernel<T, kWidth>, across * along * args.bias_b * args.bias_h,
                 Shape::kWarps * kWarp, shared, stream, args);
  });
}

}  // namespace tfm_kernels
#endif
