// ffn_bwd, CUDA. Implements FFN.5 to FFN.7 of tfm_kernels/ops/ffn.py.
// Owns:    the first launch, tiles of dh = dy w2 as in gemm.cuh, which end with dropout, gate and
//          slope: dp, dg, h again from preact, and partial sums of db1. The products of gemm.cu
//          follow: dx, and dw1, dgate, dw2, whose sums over many rows are cut in parts.
// Traffic: reads dy, w2 and preact, writes h, dp and dg; these again, dg twice where the gate has a
//          bias, and x, w1, gate; writes the results. 8 M E F FLOPs, 12 gated; where preact was not
//          saved, 2 and 4 more.
// Sums:    db1: lane by lane, over the lanes of a warp, then over warps and tiles, in fixed order.
// Limits:  float16, bfloat16, float32; sums float32; h, dp and dg are rounded once to the storage
//          type. No atomics.
// Config:  gemm::pick(), gemm_splits(); timed on an H200: 1.3 to 3 times Triton's.
// Source:  own work.
#include "gemm.h"

namespace tfm_kernels {

struct FfnBwd {
  Rows dy, w2;             // (M, Eo), (Eo, F)
  Rows p, g;               // (M, F) of preact; g absent without a gate
  void *hidden, *dp, *dg;  // (M, F) contiguous; null where they are not needed
  float* db1;              // (ffn_bwd_lines(), F) partial sums; null where it is not needed
  int64_t m;
  int f, eo;  // eo = 0: only h is needed
  DType type;
  int activation;  // its index in ACTIVATIONS
  bool aligned;    // rows of p, g, h, dp and dg start at whole packs
  Dropout dropout;
};

int64_t ffn_bwd_lines(int64_t m);
const char* launch(const FfnBwd& args, Stream stream);  // null, or what went wrong

}  // namespace tfm_kernels

#ifdef TFM_KERNEL_HALF
#include "activation.cuh"
#include "gemm.cuh"
#include "philox.cuh"

namespace tfm_kernels {
namespace {

// What dropout keeps of the pack of row m, bit by bit.
template <int lanes>
__device__ inline unsigned kept_lanes(const Dropout& dropout, int64_t m, const Place& place) {
  float ones[1][lanes];
  fill(ones, [](int, int) { return 1.0f; });
  drop(dropout, m, place, ones);
  unsigned kept = 0;
#pragma unroll
  for (int i = 0; i < lanes; ++i) kept |= ones[0][i] != 0.0f ? 1u << i : 0u;
  return kept;
}

// FFN.5's dropout and FFN.6 of a pack of row m, whose dh is laid down at `laid`: writes h, dp and
// dg, and adds dp to db1.
template <typename T>
__device__ inline void finish(const FfnBwd& args, int64_t m, const Place& place, const float* laid,
                              float (&db1)[1][kLanes<T>]) {
  constexpr int kEach = kLanes<T>;
  const auto row_of = [&](void* matrix) { return static_cast<T*>(matrix) + m * args.f; };
  const bool gated = args.g.data != nullptr, drops = args.dropout.seed != nullptr;
  const unsigned kept = drops ? kept_lanes<kEach>(args.dropout, m, place) : 0;
  // what is dropped becomes 0 even if it is inf or NaN
  const auto dropped = [&](float value, int i) {
    return kept >> i & 1 ? value * args.dropout.scale : 0.0f;
  };
  float h[1][kEach], slope[1][kEach], dh[1][kEach];
  fill(h, [](int, int) { return 0.0f; });
  visit<T, 1>(args.p, m, place, [&](int k, int i, float p) { h[k][i] = p; });
  activate(static_cast<Activation>(args.activation), h, slope);
  load_aligned<float>(laid, dh[0]);
  if (drops) fill(dh, [&](int k, int i) { return dropped(dh[k][i], i); });
  fill(slope, [&](int k, int i) { return dh[k][i] * slope[k][i]; });  // dp from here on
  if (gated) {
    fill(dh, [&](int k, int i) { return dh[k][i] * h[k][i]; });  // dg
    if (args.dg) store<T, 1>(row_of(args.dg), place, dh);
    visit<T, 1>(args.g, m, place, [&](int k, int i, float g) {
      slope[k][i] *= g;
      h[k][i] *= g;
    });
  }
  if (args.dp) store<T, 1>(row_of(args.dp), place, slope);
  fill(db1, [&](int k, int i) { return db1[k][i] + slope[k][i]; });
  if (args.hidden == nullptr) return;
  if (drops) fill(h, [&](int k, int i) { return dropped(h[k][i], i); });
  store<T, 1>(row_of(args.hidden), place, h);
}

template <typename Tiles>
__global__ void __launch_bounds__(Tiles::kThreads, Tiles::kBlocksEach)
    ffn_bwd_kernel(const FfnBwd args) {
  using T = typename Tiles::T;
  constexpr int kEach = kLanes<T>, kPacks = Tiles::kWarpColumns / kEach;
  const Factor<T> dy(args.dy), w2(args.w2);
  const int tiles_m = gemm::tiles_of(args.m, Tiles::kRows);
  const int tiles_f = gemm::tiles_of(args.f, Tiles::kColumns);
  const int steps = gemm::tiles_of(args.eo, Tiles::kDeep);
  for (int number = blockIdx.x; number < tiles_m * tiles_f; number += gridDim.x) {
    const Spot spot(number, tiles_m, tiles_f);
    const int64_t m0 = int64_t{spot.m} * Tiles::kRows;
    const int f0 = spot.n * Tiles::kColumns;
    const int first = f0 + Tiles::warp_column();
    const LeftStrip<Tiles> rows(dy, m0, args.m);
    const RightStrip<Tiles> features(w2, f0, args.f);
    Sums<Tiles> sums;
    clear<Tiles>(sums);
    product<Tiles>(sums, steps, m0 + Tiles::warp_row() < args.m && first < args.f,
                   [&](T* left, T* right, int step) {
                     const int k = step * Tiles::kDeep;
                     rows.template copy<Tiles>(left, k, args.eo);
                     features.template copy<Tiles>(right, k, args.eo);
                   });
    float db1[1][kEach];
    fill(db1, [](int, int) { return 0.0f; });
    hand_over<Tiles>(sums, Tiles::kWarpColumns, [&](int row, int column, const float* laid) {
      const int64_t m = m0 + row;
      const int f = first + column;
      if (m >= args.m || f >= args.f) return;
      finish<T>(args, m, {f, 0, args.f, args.aligned}, laid, db1);
    });
    if (args.db1) {  // of the warp's rows: lanes kPacks apart have the same columns
#pragma unroll
      for (int apart = kPacks; apart < kWarp; apart *= 2)
        fill(db1, [&](int k, int i) {
          return db1[k][i] + __shfl_xor_sync(0xffffffffu, db1[k][i], apart);
        });
      const int64_t line = int64_t{spot.m} * Tiles::kWarpsM + Tiles::warp() / Tiles::kWarpsN;
      const int f = first + lane_of_warp() * kEach;
      if (lane_of_warp() < kPacks)
#pragma unroll
        for (int i = 0; i < kEach; ++i)
          if (f + i < args.f) args.db1[line * args.f + f + i] = db1[0][i];
    }
    __syncthreads();  // the memory is free for the next tile
  }
}

}  // namespace

int64_t ffn_bwd_lines(int64_t m) {
  return 2 * gemm::ceil_div(m, 64);  // a line for each row of warps
}

const char* launch(const FfnBwd& args, Stream stream) {
  if (args.m == 0 || args.f == 0) return nullptr;
  const gemm::Config config = gemm::pick(args.m, args.f, args.type, multiprocessors(), {64, 128});
  return for_dtype(args.type, [&](auto zero) {
    // 128 rows leave too few registers for what ends a tile: sums would spill
    using L = Tiling<decltype(zero), Lie::along_k, Lie::turned, 2, 4>;
    using S = Small<decltype(zero), Lie::along_k, Lie::turned>;
    return config.large ? start_tiles<L>(ffn_bwd_kernel<L>, config, stream, args)
                        : start_tiles<S>(ffn_bwd_kernel<S>, config, stream, args);
  });
}

}  // namespace tfm_kernels

#else  // the binding
#include "ffn_call.h"

namespace tfm_kernels {
namespace {

// The results' launches, beside the first one.
struct Products {
  const FfnCall& call;
  const Tensor& like;
  Stream stream;

  Tensor result(bool need, int64_t m, int64_t n) const {
    return need ? empty(like, {m, n}, call.storage) : empty(like, {0}, call.storage);
  }

  Tensor bias(bool need, int64_t n) const { return empty(like, {need ? n : 0}, call.storage); }

  // x w [+ x2 w2] [+ bias], a row of C for each row of x.
  Tensor rows(Form form, const Rows& x, const Rows& w, int64_t n, int64_t k, const Rows& bias = {},
              const Rows& x2 = {}, const Rows& w2 = {}) const {
    Tensor c = result(true, call.rows, n);
    run(Gemm{form, call.type, x, w, x2, w2, bias, c.mutable_data_ptr(), call.rows, n, k});
    return c;
  }

  // x^T w: the gradient of a weight.
  Tensor weight(bool need, const Rows& x, const Rows& w, int64_t m, int64_t n) const {
    Tensor c = result(need, m, n);
    if (!need) return c;
    Gemm product{Form::xt_w, call.type, x, w, {}, {}, {}, c.mutable_data_ptr(), m, n, call.rows};
    product.splits = gemm_splits(m, n, call.rows);
    const int64_t parts = product.splits > 1 ? product.splits * m * n : 0;
    Tensor work = empty(like, {parts}, ScalarType::Float);
    product.parts = static_cast<float*>(work.mutable_data_ptr());
    run(product);
    return c;
  }

  // The sum of m rows, the gradient of a bias, from element `first` of `total`.
  void sum(bool need, const Rows& x, int64_t m, int64_t n, Tensor& total, int64_t first = 0) const {
    if (!need) return;
    const int runs = sum_rows_runs(m, n);
    Tensor work = empty(like, {runs > 1 ? runs * n : 0}, ScalarType::Float);
    float* parts = runs > 1 ? static_cast<float*>(work.mutable_data_ptr()) : nullptr;
    char* sums = static_cast<char*>(total.mutable_data_ptr()) + first * total.element_size();
    run(SumRows{x, sums, call.type, m, n, parts});
  }

  template <typename Args>
  void run(const Args& args) const {
    check_launch(launch(args, stream), call.op);
  }
};

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> ffn_bwd_cuda(
    const Tensor& dy, const Tensor& x, const Tensor& w1, const OptionalTensor& b1, const Tensor& w2,
    const OptionalTensor& gate, const Tensor& preact, int64_t activation, double dropout_p,
    const OptionalTensor& seed, const OptionalTensor& dropout_rows, bool need_x, bool need_w1,
    bool need_b1, bool need_w2, bool need_b2, bool need_gate) {
  const FfnCall call("ffn_bwd_cuda", x, w1, b1, w2, gate, activation);
  const int64_t M = call.rows, E = call.width, F = call.hidden, Eo = call.out;
  const bool saved = preact.dim() == 2, gated = gate.has_value();
  call.check(x, dy, {M, Eo}, "dy");
  if (saved)
    call.check(x, preact, {M, gated ? 2 * F : F}, "preact");
  else
    call.check(x, preact, {0}, "preact");
  STD_TORCH_CHECK(gated || !need_gate, call.op, ": need_gate must be False without a gate");

  const Device device(x);
  const Matrix dy2 = matrix_of(dy, call.op), x2 = matrix_of(x, call.op);
  const Matrix w = matrix_of(w1, call.op), v = matrix_of(w2, call.op), u = matrix_of(gate, call.op);
  const Matrix bias(b1, b1 ? static_cast<int>(b1->size(0)) : 0, call.op);
  const DropoutRule rule(dropout_p, seed, dropout_rows, x, M, call.op);
  const Products products{call, x, device.stream};
  const bool need_b_gate = need_b1 && call.gate_biased;
  const bool need_dp = need_x || need_w1 || need_b1;
  const bool need_dg = gated && (need_x || need_gate || need_b_gate);
  Tensor hidden = products.result(need_w2, M, F), dp = products.result(need_dp, M, F);
  Tensor dg = products.result(need_dg, M, F);
  const auto rows_of = [&](const Tensor& t) {
    return Rows{t.numel() ? t.const_data_ptr() : nullptr, F, call.type};
  };

  FfnBwd args{};
  args.m = M;
  args.f = static_cast<int>(F);
  args.type = call.type;
  args.dy = dy2.rows;
  args.w2 = v.rows;
  args.hidden = need_w2 ? hidden.mutable_data_ptr() : nullptr;
  args.dp = need_dp ? dp.mutable_data_ptr() : nullptr;
  args.dg = need_dg ? dg.mutable_data_ptr() : nullptr;
  args.eo = need_dp || need_dg ? static_cast<int>(Eo) : 0;
  args.activation = static_cast<int>(activation);
  args.dropout = rule.dropout;
  const int64_t lines = need_b1 ? ffn_bwd_lines(M) : 0;
  Tensor db1s = empty(x, {lines, F}, ScalarType::Float);
  args.db1 = need_b1 ? static_cast<float*>(db1s.mutable_data_ptr()) : nullptr;
  if (need_dp || need_dg || need_w2) {
    OptionalTensor p, g;  // computed again, where they were not saved
    Matrix kept(saved ? OptionalTensor(preact) : std::nullopt, static_cast<int>(gated ? 2 * F : F),
                call.op);
    if (saved) {
      args.p = kept.rows;
      args.g = kept.rows;
      args.g.data =
          gated ? static_cast<const char*>(kept.rows.data) + F * preact.element_size() : nullptr;
    } else {
      p = products.rows(Form::x_wt, x2.rows, w.rows, F, E, bias.rows);
      if (gated) g = products.rows(Form::x_wt, x2.rows, u.rows, F, E, call.gate_bias(bias));
      args.p = rows_of(*p);
      if (gated) args.g = rows_of(*g);
    }
    args.aligned =
        aligned(args.f, call.type, {args.p, args.g, rows_of(hidden), rows_of(dp), rows_of(dg)});
    products.run(args);
  }
  Tensor db1 = products.bias(need_b1, need_b_gate ? 2 * F : F), db2 = products.bias(need_b2, Eo);
  products.sum(need_b1, {args.db1, F, DType::f32}, lines, F, db1);
  products.sum(need_b_gate, rows_of(dg), M, F, db1, F);
  products.sum(need_b2, dy2.rows, M, Eo, db2);
  Tensor dx = need_x ? products.rows(Form::x_w, rows_of(dp), w.rows, E, F, {},
                                     need_dg ? rows_of(dg) : Rows{}, need_dg ? u.rows : Rows{})
                     : products.result(false, 0, 0);
  return {dx,  products.weight(need_w1, rows_of(dp), x2.rows, F, E),
          db1, products.weight(need_w2, dy2.rows, rows_of(hidden), Eo, F),
          db2, products.weight(need_gate, rows_of(dg), x2.rows, F, E)};
}

TFM_REGISTER(ffn_bwd_cuda)

}  // namespace
}  // namespace tfm_kernels
#endif
