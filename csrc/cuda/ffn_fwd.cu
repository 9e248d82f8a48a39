// ffn_fwd, CUDA. Implements FFN.1 to FFN.4 of tfm_kernels/ops/ffn.py.
// Owns:    the first launch, tiles of the hidden activation as in gemm.cuh: the sums p (and g, in
//          the other half of each warp's columns) end with bias, activation, gate and dropout. The
//          second is the product with w2, of gemm.cu.
// Traffic: reads x and the weights, mostly from L2; writes h (and preact), reads h, writes y.
//          4 M E F FLOPs, 6 gated.
// Limits:  float16, bfloat16, float32; sums float32; h is rounded once to the storage type. No
//          atomics.
// Config:  gemm::pick(); timed on an H200: 1.3 to 3 times Triton's.
// Source:  own work.
#include "gemm.h"

namespace tfm_kernels {

struct FfnFwd {
  Rows x, w1, gate;  // (M, E), (F, E), (F, E); gate may be absent
  Rows b1, b_gate;   // (F,), may be absent
  void* hidden;      // (M, F) = h
  void* preact;      // (M, F) = p, or (M, 2F) = [p, g]; null where it is not saved
  int64_t m;
  int e, f;
  DType type;
  int activation;  // its index in ACTIVATIONS
  bool aligned;    // rows of h and preact, and the biases, start at whole packs
  Dropout dropout;
};

const char* launch(const FfnFwd& args, Stream stream);  // null, or what went wrong

}  // namespace tfm_kernels

#ifdef TFM_KERNEL_HALF
#include "activation.cuh"
#include "gemm.cuh"
#include "philox.cuh"

namespace tfm_kernels {
namespace {

// The biases of FFN.1 and FFN.2, and FFN.3, of a pack of row m: writes preact and h. The sums of p
// are laid down at `laid`, those of g 16 floats on.
template <typename T>
__device__ inline void finish(const FfnFwd& args, int64_t m, const Place& place,
                              const float* laid) {
  float h[1][kLanes<T>], g[1][kLanes<T>];
  load_aligned<float>(laid, h[0]);
  if (args.b1.data) visit<T, 1>(args.b1, 0, place, [&](int k, int i, float b) { h[k][i] += b; });
  const bool gated = args.gate.data != nullptr;
  if (gated) load_aligned<float>(laid + 16, g[0]);
  if (args.b_gate.data)
    visit<T, 1>(args.b_gate, 0, place, [&](int k, int i, float b) { g[k][i] += b; });
  if (args.preact) {
    T* row = static_cast<T*>(args.preact) + m * (gated ? int64_t{2} * args.f : args.f);
    store<T, 1>(row, place, h);
    if (gated) store<T, 1>(row + args.f, place, g);
  }
  activate(static_cast<Activation>(args.activation), h);
  if (gated) fill(h, [&](int k, int i) { return h[k][i] * g[k][i]; });
  if (args.dropout.seed) drop(args.dropout, m, place, h);
  store<T, 1>(static_cast<T*>(args.hidden) + m * args.f, place, h);
}

template <typename Tiles>
__global__ void __launch_bounds__(Tiles::kThreads, Tiles::kBlocksEach)
    ffn_fwd_kernel(const FfnFwd args) {
  using T = typename Tiles::T;
  const Factor<T> x(args.x), w1(args.w1), gate(args.gate);
  const bool gated = args.gate.data != nullptr;
  // Of a warp's 32 columns a gate takes the last 16: p and g of a feature end in the same lane.
  const int each = gated ? Tiles::kWarpColumns / 2 : Tiles::kWarpColumns;
  const int columns = Tiles::kWarpsN * each, column = Tiles::warp_column() / Tiles::kWarpColumns;
  const int tiles_m = gemm::tiles_of(args.m, Tiles::kRows);
  const int tiles_f = gemm::tiles_of(args.f, columns);
  const int steps = gemm::tiles_of(args.e, Tiles::kDeep);
  for (int number = blockIdx.x; number < tiles_m * tiles_f; number += gridDim.x) {
    const Spot spot(number, tiles_m, tiles_f);
    const int64_t m0 = int64_t{spot.m} * Tiles::kRows;
    const int f0 = spot.n * columns;
    const bool busy = m0 + Tiles::warp_row() < args.m && f0 + column * each < args.f;
    const LeftStrip<Tiles> rows(x, m0, args.m);
    Sums<Tiles> sums;
    clear<Tiles>(sums);
    product<Tiles>(sums, steps, busy, [&](T* left, T* right, int step) {
      const int k = step * Tiles::kDeep;
      rows.template copy<Tiles>(left, k, args.e);
      copy_lines<Tiles, Tiles::kColumns, Tiles::kDeep>(
          right, at_most<Tiles::kDeep>(args.e - k), w1.packed && (!gated || gate.packed),
          [&](int l) -> const T* {
            const int within = l % Tiles::kWarpColumns;
            const int f = f0 + l / Tiles::kWarpColumns * each + (within & (each - 1));
            if (f >= args.f) return nullptr;
            return within < each ? w1.data + f * w1.stride + k : gate.data + f * gate.stride + k;
          });
    });
    hand_over<Tiles>(sums, each, [&](int row, int within, const float* laid) {
      const int64_t m = m0 + row;
      const int f = f0 + column * each + within;
      if (m >= args.m || f >= args.f) return;
      finish<T>(args, m, {f, 0, args.f, args.aligned}, laid);
    });
    __syncthreads();  // the memory is free for the next tile
  }
}

}  // namespace

const char* launch(const FfnFwd& args, Stream stream) {
  if (args.m == 0 || args.f == 0) return nullptr;
  const int columns = args.gate.data ? 64 : 128;  // of p; a gate has as many beside them
  const gemm::Config config =
      gemm::pick(args.m, args.f, args.type, multiprocessors(), {128, columns}, {64, columns / 2});
  return for_dtype(args.type, [&](auto zero) {
    using L = Large<decltype(zero), Lie::along_k, Lie::along_k>;
    using S = Small<decltype(zero), Lie::along_k, Lie::along_k>;
    return config.large ? start_tiles<L>(ffn_fwd_kernel<L>, config, stream, args)
                        : start_tiles<S>(ffn_fwd_kernel<S>, config, stream, args);
  });
}

}  // namespace tfm_kernels

#else  // the binding
#include "ffn_call.h"

namespace tfm_kernels {
namespace {

std::tuple<Tensor, Tensor> ffn_fwd_cuda(const Tensor& x, const Tensor& w1, const OptionalTensor& b1,
                                        const Tensor& w2, const OptionalTensor& b2,
                                        const OptionalTensor& gate, int64_t activation,
                                        double dropout_p, const OptionalTensor& seed,
                                        const OptionalTensor& dropout_rows, bool save_preact) {
  const FfnCall call("ffn_fwd_cuda", x, w1, b1, w2, gate, activation);
  call.check(x, b2, {call.out}, "b2");
  const int64_t M = call.rows, F = call.hidden;

  const Device device(x);
  const Matrix x2 = matrix_of(x, call.op), w = matrix_of(w1, call.op), v = matrix_of(w2, call.op);
  const Matrix g = matrix_of(gate, call.op);
  const Matrix bias1(b1, b1 ? static_cast<int>(b1->size(0)) : 0, call.op);
  const Matrix bias2(b2, static_cast<int>(call.out), call.op);
  const DropoutRule rule(dropout_p, seed, dropout_rows, x, M, call.op);
  Tensor hidden = empty(x, {M, F}, call.storage), y = empty(x, {M, call.out}, call.storage);
  Tensor preact =
      save_preact ? empty(x, {M, gate ? 2 * F : F}, call.storage) : empty(x, {0}, call.storage);

  FfnFwd args{};
  args.x = x2.rows;
  args.w1 = w.rows;
  args.gate = g.rows;
  args.b1 = bias1.rows;
  args.b_gate = call.gate_bias(bias1);
  args.hidden = hidden.mutable_data_ptr();
  args.preact = save_preact ? preact.mutable_data_ptr() : nullptr;
  args.m = M;
  args.e = static_cast<int>(call.width);
  args.f = static_cast<int>(F);
  args.type = call.type;
  args.activation = static_cast<int>(activation);
  const Rows h{args.hidden, F, call.type};
  args.aligned = aligned(args.f, call.type, {h, {args.preact, F, call.type}, args.b1, args.b_gate});
  args.dropout = rule.dropout;
  check_launch(launch(args, device.stream), call.op);

  Gemm product{Form::x_wt,           call.type, h,        v.rows, {}, {}, bias2.rows,
               y.mutable_data_ptr(), M,         call.out, F};
  check_launch(launch(product, device.stream), call.op);
  return {y, preact};
}

TFM_REGISTER(ffn_fwd_cuda)

}  // namespace
}  // namespace tfm_kernels
#endif
