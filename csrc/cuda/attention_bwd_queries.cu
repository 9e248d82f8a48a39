// dq of attention, A.8: a launch of attention_bwd (attention_bwd.cu).
// Owns:    a block of four warps = 64 queries of one head, 16 a warp, which stay in shared memory
//          with their output gradients; tiles of keys and values pass, as in the forward.
// Traffic: reads q, dout and the rows' numbers once, k and v once for each tile of queries that
// sees
//          them; writes dq.
// Config:  PairsShape of attention_bwd_tile.cuh; timed on an H200: 1.3 to 3 times Triton's.
// Source:  own work, after Dao 2023, arXiv:2307.08691, algorithm 2.
#include "attention_bwd.h"

#ifdef TFM_KERNEL_HALF
#include "attention_bwd_tile.cuh"

namespace tfm_kernels {
namespace {

template <typename T, int width>
__global__ void __launch_bounds__(PairsShape<sizeof(T), width>::kWarps* kWarp, 1)
    attention_bwd_queries_kernel(const AttentionBwd args) {
  using Shape = PairsShape<sizeof(T), width>;
  constexpr int kN = Shape::kN, kRows = Shape::kRows, kKeys = Shape::kKeys;
  constexpr int kStride = kTileStride<T, width>;
  const Attention& call = args.call;
  const int tiles = (call.queries + kRows - 1) / kRows;
  const int64_t b = blockIdx.x / tiles / call.heads, h = blockIdx.x / tiles % call.heads;
  const Sequence s = sequence_of(call, b);
  const int m0 = (tiles - 1 - static_cast<int>(blockIdx.x % tiles)) * kRows;
  if (m0 >= s.tq) return;
  const HeadOfCall head(call, s, b, h);
  const T* k = rows_of<T>(call.k, b, h / call.group, s.k0);
  const T* v = rows_of<T>(call.v, b, h / call.group, s.k0);
  const RowNumbers* rows = reinterpret_cast<const RowNumbers*>(args.rows) + b * call.lse_stride_b +
                           h * call.lse_stride_h + s.q0;
  T* q_tile = reinterpret_cast<T*>(shared_floats());
  T *dout_tile = q_tile + kRows * kStride, *passing = dout_tile + kRows * kStride;

  const KeyTiles<kRows, kKeys> walk{head, m0, keys_met(s, m0, kRows)};
  const auto copy_keys = [&](int n0, int stage) {
    T* tile = passing + stage * 2 * kKeys * kStride;
    const Met& met = walk.met;
    copy_rows<kKeys, width>(tile, call.k, k, n0, met.begin, met.end, call.d);
    copy_rows<kKeys, width>(tile + kKeys * kStride, call.v, v, n0, met.begin, met.end, call.dv);
    copy_commit();
  };
  copy_rows<kRows, width>(q_tile, call.q, rows_of<T>(call.q, b, h, s.q0), m0, m0, s.tq, call.d);
  copy_rows<kRows, width>(dout_tile, args.dout, rows_of<T>(args.dout, b, h, s.q0), m0, m0, s.tq,
                          call.dv);
  int n0 = walk.next(walk.met.first(kKeys));
  if (n0 < walk.met.end) copy_keys(n0, 0);

  const int mine = static_cast<int>(threadIdx.x) / kWarp * 16;  // the warp's first row
  float dq[1][width / 8][4] = {};
  for (int stage = 0; n0 < walk.met.end;) {
    const int next = walk.next(n0 + kKeys);
    if (Shape::kStages == 2 && next < walk.met.end) {
      copy_keys(next, stage ^ 1);
      copy_wait<1>();
    } else {
      copy_wait<0>();
    }
    __syncthreads();  // the keys are there
    const T *k_tile = passing + stage * 2 * kKeys * kStride, *v_tile = k_tile + kKeys * kStride;
    if (m0 + mine < s.tq) {
      float x[1][kN][4] = {}, products[1][kN][4] = {};
      uint64_t seen = ~uint64_t{0};
      add_dots<width>(x, q_tile + mine * kStride, k_tile, call.d);
      add_dots<width>(products, dout_tile + mine * kStride, v_tile, call.dv);
      if (call.scored || !walk.full(n0)) {
        score<T, false>(call, head, m0 + mine, n0, x);
        seen = seen_columns(head, x);
      }
      differentiate_all<false>(call, head, rows, m0 + mine, n0, x, products);
      add_weighted<width>(dq, products, k_tile, call.d, seen);
    }
    __syncthreads();  // nobody reads the keys any more
    if (Shape::kStages == 2)
      stage ^= 1;
    else if (next < walk.met.end)
      copy_keys(next, 0);
    n0 = next;
  }
  copy_commit();  // of queries that see nothing the copies are in no group yet, and end here
  copy_wait<0>();
  __syncthreads();
  put_sums<width>(q_tile + mine * kStride, dq[0], call.scale, call.scale);
  __syncwarp();
  store_rows<width>(q_tile + mine * kStride, args.dq,
                    const_cast<T*>(rows_of<T>(args.dq, b, h, s.q0)), m0 + mine, s.tq, call.d);
}

}  // namespace

const char* launch_queries(const AttentionBwd& args, Stream stream) {
  return for_shape(args.call, [&](auto zero, auto wide) {
    using T = decltype(zero);
    constexpr int kWidth = decltype(wide)::value;
    using Shape = PairsShape<sizeof(T), kWidth>;
    const int64_t tiles = (args.call.queries + Shape::kRows - 1) / Shape::kRows;
    const int rows = 2 * Shape::kRows + 2 * Shape::kStages * Shape::kKeys;
    return start(attention_bwd_queries_kernel<T, kWidth>, tiles * args.call.heads * args.call.batch,
                 Shape::kWarps * kWarp, rows * kTileStride<T, kWidth> * static_cast<int>(sizeof(T)),
                 stream, args);
  });
}

}  // namespace tfm_kernels
#endif
