// layer_norm_fwd, CUDA. Implements LN.1 to LN.3 of tfm_kernels/ops/layer_norm.py.
// Owns:    up to 1024 features a warp = a row, beyond a block = a row; a grid of as many blocks as
//          run at once, which share the rows. Up to 16384 features the row stays in registers, 16
//          or 32 elements a thread; longer ones are walked three times (from L2 but for the first).
// Traffic: reads x (and residual), writes y (and z), M*N each; weight and bias come from L1.
//          16 or 24 warps a multiprocessor, each with a row of loads of 16 bytes in flight.
// Limits:  N <= 65536; float16, bfloat16, float32 in any mixture; sums float32. No atomics.
// Config:  pick() below; timed on an H200: 1.3 to 3 times Triton's.
// Source:  own work.
#include "layer_norm.h"

namespace tfm_kernels {

struct LayerNormFwd {
  Rows x, residual;    // (M, N); residual may be absent
  Rows weight, bias;   // (N,), either may be absent
  void *y, *z;         // (M, N) contiguous of `type`; z null without a residual, y if not kept
  float *mean, *rstd;  // (M,); mean null for RMSNorm
  int64_t rows;
  int n;
  DType type;  // of z: the promoted type of x and residual
  bool unbiased, aligned;
  float eps, eps_outside;
  Dropout dropout;
};

const char* launch(const LayerNormFwd& args, Stream stream);  // null, or what went wrong

namespace layer_norm_fwd {

using namespace layer_norm;

// The launch for rows of n features: 16 to 32 warps on every multiprocessor.
constexpr Config pick(int n) {
  if (n <= 512) return {Shape::warp_512, 128, 6};
  if (n <= 1024) return {Shape::warp_1024, 128, 4};
  if (n > 16384) return {Shape::walk, 1024, 1};
  const int threads = (n + 16 * 32 - 1) / (16 * 32) * 32;
  return {Shape::block, threads, 1024 / threads};
}

}  // namespace layer_norm_fwd
}  // namespace tfm_kernels

#ifdef TFM_KERNEL_HALF
#include "pack.cuh"
#include "philox.cuh"
#include "reduce.cuh"

namespace tfm_kernels {
namespace {

constexpr float kFar = 256.0f;  // standard deviations from 0, from where on the mean is corrected

// LN.1: z of row m in `values`, 0 beyond the row; as it was stored where it is a sum.
template <typename T, int packs>
__device__ void load_sum(const LayerNormFwd& args, int64_t m, const Place& place,
                         float (&values)[packs][kLanes<T>]) {
  fill(values, [](int, int) { return 0.0f; });
  visit<T, packs>(args.x, m, place, [&](int k, int i, float x) { values[k][i] = x; });
  if (args.residual.data == nullptr) return;
  if (args.dropout.seed != nullptr) drop(args.dropout, m, place, values);
  visit<T, packs>(args.residual, m, place, [&](int k, int i, float r) {
    values[k][i] = static_cast<float>(static_cast<T>(values[k][i] + r));
  });
  store<T, packs>(static_cast<T*>(args.z) + m * args.n, place, values);
}

// z of row m again, as this thread itself stored it where it is a sum.
template <typename T, int packs>
__device__ void load_again(const LayerNormFwd& args, int64_t m, const Place& place,
                           float (&values)[packs][kLanes<T>]) {
  const Rows z = args.z ? Rows{args.z, args.n, args.type} : args.x;
  visit<T, packs>(z, m, place, [&](int k, int i, float x) { values[k][i] = x; });
}

// LN.3: from xhat to y.
template <typename T, int packs>
__device__ void scale_and_store(const LayerNormFwd& args, int64_t m, const Place& place,
                                float (&values)[packs][kLanes<T>]) {
  if (args.weight.data)
    visit<T, packs>(args.weight, 0, place, [&](int k, int i, float w) { values[k][i] *= w; });
  if (args.bias.data)
    visit<T, packs>(args.bias, 0, place, [&](int k, int i, float b) { values[k][i] += b; });
  store<T, packs>(static_cast<T*>(args.y) + m * args.n, place, values);
}

template <typename T, typename Group, int packs, int max_threads, int blocks_each, bool walks>
__global__ void __launch_bounds__(max_threads, blocks_each)
    layer_norm_fwd_kernel(const LayerNormFwd args) {
  constexpr int kEach = kLanes<T>;
  Group group;
  const int distance = group.size() * kEach, end = walks ? args.n : 1;
  const auto place = [&](int start) {
    return Place{start + group.rank() * kEach, distance, args.n, args.aligned};
  };
  float values[packs][kEach];
  for (int64_t m = group.first(); m < args.rows; m += group.step()) {
    float sum = 0.0f;
    for (int start = 0; start < end; start += packs * distance) {
      load_sum<T>(args, m, place(start), values);
      sum += sum_terms<packs, kEach>([&](int k, int i) { return values[k][i]; });
    }
    float mean = 0.0f;
    if (args.mean) mean = group.sum(sum) / static_cast<float>(args.n);

    // what this thread holds of z from `start` on, less the mean
    const auto centre = [&](int start) {
      const Place here = place(start);
      if (walks) load_again<T>(args, m, here, values);
      fill(values, [&](int k, int i) {
        return here.first + k * distance + i < args.n ? values[k][i] - mean : 0.0f;
      });
    };
    float squares = 0.0f;
    for (int start = 0; start < end; start += packs * distance) {
      centre(start);
      squares += sum_terms<packs, kEach>([&](int k, int i) { return values[k][i] * values[k][i]; });
    }
    squares = group.sum(squares);
    // numbers far from 0, nearly equal or equal: the rounded mean of a number is not that number,
    // so what is left of it is taken off (LN.2)
    if (args.mean && kFar * kFar * squares < static_cast<float>(args.n) * mean * mean) {
      float left = 0.0f;
      for (int start = 0; start < end; start += packs * distance) {
        if (walks) centre(start);
        left += sum_terms<packs, kEach>([&](int k, int i) { return values[k][i]; });
      }
      left = group.sum(left);
      const float off = left / static_cast<float>(args.n), before = mean;
      squares = fmaxf(squares - left * off, 0.0f);
      mean += off;
      if (!walks) fill(values, [&](int k, int i) { return values[k][i] + before - mean; });
    }
    const float divisor = static_cast<float>(args.unbiased ? args.n - 1 : args.n);
    const float rstd = 1.0f / (sqrtf(squares / divisor + args.eps) + args.eps_outside);

    for (int start = 0; start < end; start += packs * distance) {
      if (walks) load_again<T>(args, m, place(start), values);
      fill(values, [&](int k, int i) { return (values[k][i] - (walks ? mean : 0.0f)) * rstd; });
      scale_and_store<T>(args, m, place(start), values);
    }
    if (group.rank() == 0) {
      if (args.mean) args.mean[m] = mean;
      args.rstd[m] = rstd;
    }
  }
}

}  // namespace

const char* launch(const LayerNormFwd& args, Stream stream) {
  using namespace layer_norm_fwd;
  const Config config = pick(args.n);
  return for_dtype(args.type, [&](auto zero) {
    using T = decltype(zero);
    constexpr int kPacks = 16 / kLanes<T>;  // of 16 elements
    auto kernel = layer_norm_fwd_kernel<T, WarpGroup, kPacks, pick(512).threads,
                                        pick(512).blocks_each, false>;
    int shared = WarpGroup::kSharedFloats;
    if (config.shape == Shape::warp_1024)
      kernel = layer_norm_fwd_kernel<T, WarpGroup, 2 * kPacks, pick(1024).threads,
                                     pick(1024).blocks_each, false>;
    if (config.shape == Shape::block || config.shape == Shape::walk) {
      kernel = config.shape == Shape::block
                   ? layer_norm_fwd_kernel<T, BlockGroup, kPacks, pick(16384).threads, 1, false>
                   : layer_norm_fwd_kernel<T, BlockGroup, kPacks, pick(16385).threads, 1, true>;
      shared = BlockGroup::kSharedFloats;
    }
    const int64_t wanted = args.rows < 1 ? 1 : args.rows;
    const int64_t blocks = static_cast<int64_t>(multiprocessors()) * config.blocks_each;
    return start(kernel, static_cast<int>(wanted < blocks ? wanted : blocks), config.threads,
                 shared * static_cast<int>(sizeof(float)), stream, args);
  });
}

}  // namespace tfm_kernels

#else  // the binding
#include "binding.h"

namespace tfm_kernels {
namespace {

std::tuple<Tensor, Tensor, Tensor, Tensor> layer_norm_fwd_cuda(
    const Tensor& x, const OptionalTensor& residual, const OptionalTensor& weight,
    const OptionalTensor& bias, double eps, double eps_outside, bool rms, bool unbiased,
    double dropout_p, const OptionalTensor& seed, const OptionalTensor& dropout_rows,
    bool keep_sum) {
  constexpr const char* kOp = "layer_norm_fwd_cuda";
  const int n = check_features(x, layer_norm::kMaxFeatures, kOp, "x");
  const int64_t rows = x.numel() / n;
  check_like(residual, x, x.sizes(), kOp, "residual");
  check_like(weight, x, {n}, kOp, "weight");
  check_like(bias, x, {n}, kOp, "bias");
  const DType type = promote(dtype_of(x, kOp, "x"), dtype_of(residual, x, kOp, "residual"));
  check_beside(weight, type, kOp, "weight");
  check_beside(bias, type, kOp, "bias");

  const Device device(x);
  const Matrix x2(x, n, kOp), residual2(residual, n, kOp), w(weight, n, kOp), b(bias, n, kOp);
  const ScalarType storage = scalar_type(type);
  Tensor y = empty(x, x.sizes(), storage);
  Tensor z = residual && keep_sum ? empty(x, x.sizes(), storage) : empty(x, {0}, storage);
  Tensor mean = empty(x, {rms ? 0 : rows}, ScalarType::Float);
  Tensor rstd = empty(x, {rows}, ScalarType::Float);
  const DropoutRule rule(residual ? dropout_p : 0.0, seed, dropout_rows, x, rows, kOp);
  if (rows == 0) return {y, z, mean, rstd};

  LayerNormFwd args{};
  args.x = x2.rows;
  args.residual = residual2.rows;
  args.weight = w.rows;
  args.bias = b.rows;
  args.y = y.mutable_data_ptr();
  args.z = residual ? (keep_sum ? z : y).mutable_data_ptr() : nullptr;
  args.mean = rms ? nullptr : static_cast<float*>(mean.mutable_data_ptr());
  args.rstd = static_cast<float*>(rstd.mutable_data_ptr());
  args.rows = rows;
  args.n = n;
  args.type = type;
  args.unbiased = unbiased;
  args.aligned = aligned(n, type, {x2.rows, residual2.rows, w.rows, b.rows});
  args.eps = static_cast<float>(eps);
  args.eps_outside = static_cast<float>(eps_outside);
  args.dropout = rule.dropout;
  check_launch(launch(args, device.stream), kOp);
  return {y, z, mean, rstd};
}

TFM_REGISTER(layer_norm_fwd_cuda)

}  // namespace
}  // namespace tfm_kernels
#endif
