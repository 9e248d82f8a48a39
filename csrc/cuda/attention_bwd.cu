// attention_bwd, CUDA. Implements A.5 to A.10 of tfm_kernels/ops/attention.py.
// Owns:    three launches, four with a bias gradient, each with results of its own: numbers of each
//          row (here), dk and dv by tiles of keys (attention_bwd_keys.cu), dq by tiles of queries
//          (attention_bwd_queries.cu), dbias by tiles of the bias (attention_bwd_bias.cu). No
//          atomics: every sum has a fixed order.
// Method:  weights are made again from lse, in each launch. What counts for nothing (rows that see
//          no key, keys that none of a warp's queries sees) is taken as 0, whatever it holds. Rows
//          whose lse is so large that it has lost log(sum) are met once more for it, here.
// Traffic: this launch reads out, dout, lse (and dlse); writes four numbers of each row.
// Limits:  D, Dv <= 256; float16, bfloat16, float32 (fused multiply-adds).
// Config:  RowsShape below, and in the other files; timed on an H200: 1.3 to 3 times Triton's.
// Source:  own work, after Dao 2023, arXiv:2307.08691, algorithm 2.
#include "attention_bwd.h"

#ifdef TFM_KERNEL_HALF
#include "attention_bwd_tile.cuh"

namespace tfm_kernels {
namespace {

constexpr float kFarFromZero = 65536.0f;

template <int item_size, int width>
struct RowsShape {
  static constexpr int kWarps = 4, kN = width == 256 && item_size == 4 ? 2 : 4;
  static constexpr int kRows = kWarps * 16, kKeys = kN * 8;
};

// dout . out of one row, the same in every lane.
template <typename T>
__device__ float dot_of_row(const Heads& a_heads, const T* a, const Heads& b_heads, const T* b,
                            int n) {
  const bool packs = a_heads.aligned && b_heads.aligned && n % kLanes<T> == 0;
  float sum = 0.0f;  // in one order, however the rows lie
  for (int c = lane_of_warp() * kLanes<T>; c < n; c += kWarp * kLanes<T>) {
    float left[kLanes<T>] = {}, right[kLanes<T>] = {};
    if (packs) {
      load_aligned<T, kLanes<T>>(a + c, left);
      load_aligned<T, kLanes<T>>(b + c, right);
    } else {
#pragma unroll
      for (int i = 0; i < kLanes<T>; ++i)
        if (c + i < n) {
          left[i] = static_cast<float>(a[(c + i) * a_heads.stride_d]);
          right[i] = static_cast<float>(b[(c + i) * b_heads.stride_d]);
        }
    }
#pragma unroll
    for (int i = 0; i < kLanes<T>; ++i) sum = fmaf(left[i], right[i], sum);
  }
  return warp_sum(sum);
}

// The largest score of each row and the sum relative to it, as in the forward. All threads call.
template <typename T, int width>
__device__ void meet_again(const AttentionBwd& args, const HeadOfCall& head, int64_t b, int64_t h,
                           int m0, Softmax<1>& softmax) {
  using Shape = RowsShape<sizeof(T), width>;
  constexpr int kStride = kTileStride<T, width>;
  const Attention& call = args.call;
  const Sequence& s = head.s;
  const T *q = rows_of<T>(call.q, b, h, s.q0), *k = rows_of<T>(call.k, b, h / call.group, s.k0);
  T *q_tile = reinterpret_cast<T*>(shared_floats()), *k_tile = q_tile + Shape::kRows * kStride;
  const int mine = static_cast<int>(threadIdx.x) / kWarp * 16;
  const Met met = keys_met(s, m0, Shape::kRows);
  copy_rows<Shape::kRows, width>(q_tile, call.q, q, m0, m0, s.tq, call.d);
  for (int n0 = met.first(Shape::kKeys); n0 < met.end; n0 += Shape::kKeys) {
    copy_rows<Shape::kKeys, width>(k_tile, call.k, k, n0, met.begin, met.end, call.d);
    copy_commit();
    copy_wait<0>();
    __syncthreads();  // the keys are there
    float x[1][Shape::kN][4] = {}, decays[1][2];
    add_dots<width>(x, q_tile + mine * kStride, k_tile, call.d);
    score<T, false>(call, head, m0 + mine, n0, x);
    softmax.weigh(x, call.step, decays);
    __syncthreads();  // nobody reads the keys any more
  }
  copy_wait<0>();
  softmax.finish();
}

template <typename T, int width>
__global__ void __launch_bounds__(RowsShape<sizeof(T), width>::kWarps* kWarp, 1)
    attention_bwd_rows_kernel(const AttentionBwd args) {
  using Shape = RowsShape<sizeof(T), width>;
  const Attention& call = args.call;
  const int tiles = (call.queries + Shape::kRows - 1) / Shape::kRows;
  const int64_t b = blockIdx.x / tiles / call.heads, h = blockIdx.x / tiles % call.heads;
  const Sequence s = sequence_of(call, b);
  const int m0 = static_cast<int>(blockIdx.x % tiles) * Shape::kRows;
  if (m0 >= s.tq) return;
  const int64_t first = b * call.lse_stride_b + h * call.lse_stride_h + s.q0;
  const int mine = m0 + static_cast<int>(threadIdx.x) / kWarp * 16;
  const T *out = rows_of<T>(args.out, b, h, s.q0), *dout = rows_of<T>(args.dout, b, h, s.q0);
  const auto is_far = [](float lse) { return fabsf(lse) > kFarFromZero && fabsf(lse) < kInfinity; };
  bool any_far = false;
  for (int i = mine; i < mine + 16 && i < s.tq; ++i)
    any_far = any_far || is_far(args.lse[first + i]);
  Softmax<1> softmax;
  if (__syncthreads_or(any_far))
    meet_again<T, width>(args, HeadOfCall(call, s, b, h), b, h, m0, softmax);
  float deltas[2] = {0.0f, 0.0f};  // of rows g and g + 8
#pragma unroll 1
  for (int row = 0; row < 16 && mine + row < s.tq; ++row) {
    const int64_t i = mine + row;
    const float dot = dot_of_row(args.dout, dout + i * args.dout.stride_t, args.out,
                                 out + i * args.out.stride_t, call.dv);
    if (row == lane_row()) deltas[0] = dot;
    if (row == lane_row() + 8) deltas[1] = dot;
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int i = mine + lane_row() + half * 8;
    if (lane_column() != 0 || i >= s.tq) continue;
    const float lse = args.lse[first + i];
    const bool blind = lse == -kInfinity, far = is_far(lse);
    const float dlse = args.dlse == nullptr ? 0.0f : args.dlse[first + i];
    float4 found{blind ? kInfinity : lse / call.unit, 0.0f, blind ? 0.0f : deltas[half] - dlse,
                 0.0f};
    if (far) {
      found.x = softmax.tops[0][half];
      found.y = log2f(softmax.sums[0][half]);
    }
    reinterpret_cast<float4*>(args.rows)[first + i] = found;
  }
}

}  // namespace

const char* launch_rows(const AttentionBwd& args, Stream stream) {
  return for_shape(args.call, [&](auto zero, auto wide) {
    using T = decltype(zero);
    constexpr int kWidth = decltype(wide)::value;
    using Shape = RowsShape<sizeof(T), kWidth>;
    const int64_t tiles = (args.call.queries + Shape::kRows - 1) / Shape::kRows;
    const int shared =
        (Shape::kRows + Shape::kKeys) * kTileStride<T, kWidth> * static_cast<int>(sizeof(T));
    return start(attention_bwd_rows_kernel<T, kWidth>, tiles * args.call.heads * args.call.batch,
                 Shape::kWarps * kWarp, shared, stream, args);
  });
}

}  // namespace tfm_kernels

#else  // the binding
#include "attention_call.h"

namespace tfm_kernels {
namespace {

std::tuple<Tensor, Tensor, Tensor, Tensor> attention_bwd_cuda(
    const Tensor& dout, const OptionalTensor& dlse, const Tensor& query, const Tensor& key,
    const Tensor& value, const Tensor& out, const Tensor& lse, const OptionalTensor& bias,
    const OptionalTensor& keep, const OptionalTensor& key_lengths,
    const OptionalTensor& cu_seqlens_q, const OptionalTensor& cu_seqlens_k, int64_t max_seqlen_q,
    int64_t max_seqlen_k, std::vector<int64_t> window, double scale, double dropout_p,
    const OptionalTensor& seed, bool /*deterministic*/, bool need_dbias) {
  const AttentionCall call("attention_bwd_cuda", query, key, value, bias, keep, key_lengths,
                           cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, window, scale,
                           dropout_p, seed);
  const std::vector<int64_t> numbers = call.statistics_sizes();
  std::vector<int64_t> single(query.sizes().begin(), query.sizes().end());
  single.back() = call.args.dv;
  for (const auto& [name, t] :
       {std::pair<const char*, const Tensor*>{"dout", &dout}, {"out", &out}}) {
    check_like(*t, query, single, call.op, name);
    check_type(*t, query.scalar_type(), call.op, name);
  }
  check_like(lse, query, numbers, call.op, "lse");
  check_type(lse, ScalarType::Float, call.op, "lse");
  check_like(dlse, query, numbers, call.op, "dlse");
  check_type(dlse, ScalarType::Float, call.op, "dlse");
  STD_TORCH_CHECK(bias || !need_dbias, call.op, ": need_dbias needs a bias");

  const Device device(query);
  Tensor dq = call.empty_like(query, call.args.d), dk = call.empty_like(key, call.args.d);
  Tensor dv = call.empty_like(value, call.args.dv);
  Tensor dbias = need_dbias ? empty(query, bias->sizes(), bias->scalar_type())
                            : empty(query, {0}, query.scalar_type());
  if (out.numel() == 0 || key.numel() == 0) {
    for (Tensor* t : {&dq, &dk, &dv, &dbias}) torch::stable::zero_(*t);
    return {dq, dk, dv, dbias};
  }
  const Tensor lse_rows = torch::stable::contiguous(lse);
  const OptionalTensor dlse_rows = dlse ? OptionalTensor(torch::stable::contiguous(*dlse)) : dlse;
  Tensor rows = empty(query, {lse.numel(), 4}, ScalarType::Float);
  AttentionBwd args{};
  args.call = call.args;
  args.out = call.heads(out), args.dout = call.heads(dout);
  args.dq = call.result(dq), args.dk = call.result(dk), args.dv = call.result(dv);
  args.lse = static_cast<const float*>(lse_rows.const_data_ptr());
  args.dlse = dlse ? static_cast<const float*>(dlse_rows->const_data_ptr()) : nullptr;
  args.rows = static_cast<float*>(rows.mutable_data_ptr());
  check_launch(launch_rows(args, device.stream), call.op);
  check_launch(launch_keys(args, device.stream), call.op);
  check_launch(launch_queries(args, device.stream), call.op);
  if (need_dbias && dbias.numel() > 0) {
    args.dbias = dbias.mutable_data_ptr();
    const auto size = [&](int axis) { return static_cast<int>(bias->size(axis)); };
    args.bias_b = size(0), args.bias_h = size(1), args.bias_q = size(2), args.bias_k = size(3);
    check_launch(launch_bias(args, device.stream), call.op);
  }
  return {dq, dk, dv, dbias};
}

TFM_REGISTER(attention_bwd_cuda)

}  // namespace
}  // namespace tfm_kernels
#endif
