// attention_fwd, CUDA. Implements A.1 to A.4 of tfm_kernels/ops/attention.py.
// Owns:    a block of four warps = up to 128 queries of one head, 16 or 32 a warp, which stay in
//          shared memory; tiles of keys and values pass, each on its way (cp.async) while the other
//          one is multiplied. Tiles that no query sees are left out, those of a keep matrix after a
//          look at it; tiles that all queries see need no mask.
// Method:  online softmax; scores, weights and sums stay in registers: the sums of q k^T are, as
//          they lie, the left factor of p v, rounded to the values' type. Dropout's scale comes
//          last. With bias or keep, a value that none of a warp's queries sees counts as 0, so that
//          NaN in padding reaches nothing.
// Traffic: reads q once, k and v once for each tile of queries that sees them (L2), bias once, keep
//          twice; writes out, lse.
// Limits:  D, Dv <= 256; float16, bfloat16, float32 (fused multiply-adds). No atomics.
// Config:  FwdShape below; timed on an H200: 1.3 to 3 times Triton's.
// Source:  own work, after Dao 2023, arXiv:2307.08691, algorithm 1.
#include "attention.h"

namespace tfm_kernels {

struct AttentionFwd {
  Attention call;
  Heads out;   // as q, of Dv elements
  float* lse;  // (B, Hq, Tq) or (Hq, total)
};

const char* launch(const AttentionFwd& args, Stream stream);  // null, or what went wrong

namespace attention_fwd {

constexpr int kWarps = 4;

// Fragments of a warp for heads of at most `width`: 16 kM queries, 8 kN keys.
template <int item_size, int width>
struct FwdShape {
  static constexpr int kM = item_size == 2 && width == 64 ? 2 : 1;
  static constexpr int kN = width == 256 ? 8 / item_size : item_size == 2 && width == 128 ? 8 : 4;
  static constexpr int kRows = kWarps * kM * 16, kKeys = kN * 8;
};

}  // namespace attention_fwd
}  // namespace tfm_kernels

#ifdef TFM_KERNEL_HALF
#include "attention_softmax.cuh"

namespace tfm_kernels {
namespace {

using attention_fwd::FwdShape;

template <typename T, int width>
__global__ void __launch_bounds__(attention_fwd::kWarps* kWarp, 1)
    attention_fwd_kernel(const AttentionFwd args) {
  using Shape = FwdShape<sizeof(T), width>;
  constexpr int kM = Shape::kM, kN = Shape::kN, kStride = kTileStride<T, width>;
  const Attention& call = args.call;
  const int tiles = (call.queries + Shape::kRows - 1) / Shape::kRows;
  const int64_t b = blockIdx.x / tiles / call.heads, h = blockIdx.x / tiles % call.heads;
  const Sequence s = sequence_of(call, b);
  // the last tile, which sees most where a mask is causal, comes first
  const int m0 = (tiles - 1 - static_cast<int>(blockIdx.x % tiles)) * Shape::kRows;
  if (m0 >= s.tq) return;
  const HeadOfCall head(call, s, b, h);
  const T* q = rows_of<T>(call.q, b, h, s.q0);
  const T* k = rows_of<T>(call.k, b, h / call.group, s.k0);
  const T* v = rows_of<T>(call.v, b, h / call.group, s.k0);
  T* q_tile = reinterpret_cast<T*>(shared_floats());
  T *k_tile = q_tile + Shape::kRows * kStride, *v_tile = k_tile + Shape::kKeys * kStride;

  const KeyTiles<Shape::kRows, Shape::kKeys> walk{head, m0, keys_met(s, m0, Shape::kRows)};
  const auto copy_keys = [&](const Heads& heads, T* tile, const T* from, int n0, int d) {
    copy_rows<Shape::kKeys, width>(tile, heads, from, n0, walk.met.begin, walk.met.end, d);
    copy_commit();
  };
  const int mine = static_cast<int>(threadIdx.x) / kWarp * kM * 16;  // the warp's first row
  const bool idle = m0 + mine >= s.tq;
  float out[kM][width / 8][4] = {};
  Softmax<kM> softmax;

  copy_rows<Shape::kRows, width>(q_tile, call.q, q, m0, m0, s.tq, call.d);
  int n0 = walk.next(walk.met.first(Shape::kKeys));
  if (n0 < walk.met.end) copy_keys(call.k, k_tile, k, n0, call.d);
  while (n0 < walk.met.end) {
    copy_wait<0>();
    __syncthreads();  // the keys are there, and nobody reads the values any more
    copy_keys(call.v, v_tile, v, n0, call.dv);
    float p[kM][kN][4] = {};
    uint64_t seen = ~uint64_t{0};
    if (!idle) {
      add_dots<width>(p, q_tile + mine * kStride, k_tile, call.d);
      if (call.scored || !walk.full(n0)) {
        score<T, false>(call, head, m0 + mine, n0, p);
        seen = seen_columns(head, p);
      }
      float decays[kM][2];
      softmax.weigh(p, call.step, decays);
#pragma unroll
      for (int i = 0; i < 4 * kM * width / 8; ++i)
        out[i / 4 / (width / 8)][i / 4 % (width / 8)][i % 4] *=
            decays[i / 4 / (width / 8)][i % 4 / 2];
      if (call.dropout.seed != nullptr) drop(call.dropout, head, m0 + mine, n0, p);
    }
    const int next = walk.next(n0 + Shape::kKeys);
    copy_wait<0>();
    __syncthreads();  // the values are there, and nobody reads the keys any more
    if (next < walk.met.end) copy_keys(call.k, k_tile, k, next, call.d);
    if (!idle) add_weighted<width>(out, p, v_tile, call.dv, seen);
    n0 = next;
  }
  copy_commit();  // of queries that see nothing the copies are in no group yet, and end here
  copy_wait<0>();
  __syncthreads();
  if (idle) return;

  softmax.finish();
  float* lse = args.lse + b * call.lse_stride_b + h * call.lse_stride_h + s.q0;
  T* to = const_cast<T*>(rows_of<T>(args.out, b, h, s.q0));
#pragma unroll
  for (int m = 0; m < kM; ++m) {
    const int row = mine + m * 16;
    float factor[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = softmax.sums[m][half];
      const bool sees = sum != 0.0f;
      const int i = m0 + row + lane_row() + half * 8;
      factor[half] = sees ? call.dropout.scale / sum : 0.0f;
      if (lane_column() == 0 && i < s.tq)
        lse[i] = sees ? softmax.tops[m][half] * call.unit + logf(sum) : -kInfinity;
    }
    put_sums<width>(q_tile + row * kStride, out[m], factor[0], factor[1]);
    __syncwarp();
    store_rows<width>(q_tile + row * kStride, args.out, to, m0 + row, s.tq, call.dv);
  }
}

}  // namespace

const char* launch(const AttentionFwd& args, Stream stream) {
  return for_shape(args.call, [&](auto zero, auto wide) {
    using T = decltype(zero);
    constexpr int kWidth = decltype(wide)::value;
    using Shape = FwdShape<sizeof(T), kWidth>;
    const int64_t tiles = (args.call.queries + Shape::kRows - 1) / Shape::kRows;
    const int shared =
        (Shape::kRows + 2 * Shape::kKeys) * kTileStride<T, kWidth> * static_cast<int>(sizeof(T));
    return start(attention_fwd_kernel<T, kWidth>, tiles * args.call.heads * args.call.batch,
                 attention_fwd::kWarps * kWarp, shared, stream, args);
  });
}

}  // namespace tfm_kernels

#else  // the binding
#include "attention_call.h"

namespace tfm_kernels {
namespace {

std::tuple<Tensor, Tensor> attention_fwd_cuda(
    const Tensor& query, const Tensor& key, const Tensor& value, const OptionalTensor& bias,
    const OptionalTensor& keep, const OptionalTensor& key_lengths,
    const OptionalTensor& cu_seqlens_q, const OptionalTensor& cu_seqlens_k, int64_t max_seqlen_q,
    int64_t max_seqlen_k, std::vector<int64_t> window, double scale, double dropout_p,
    const OptionalTensor& seed, bool /*deterministic*/) {
  const AttentionCall call("attention_fwd_cuda", query, key, value, bias, keep, key_lengths,
                           cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, window, scale,
                           dropout_p, seed);
  const Device device(query);
  Tensor out = call.empty_like(query, call.args.dv);
  Tensor lse = empty(query, call.statistics_sizes(), ScalarType::Float);
  if (out.numel() == 0) return {out, lse};
  AttentionFwd args{};
  args.call = call.args;
  args.out = call.result(out);
  args.lse = static_cast<float*>(lse.mutable_data_ptr());
  check_launch(launch(args, device.stream), call.op);
  return {out, lse};
}

TFM_REGISTER(attention_fwd_cuda)

}  // namespace
}  // namespace tfm_kernels
#endif
