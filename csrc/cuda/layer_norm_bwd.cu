// layer_norm_bwd, CUDA. Implements LN.4 to LN.6 of tfm_kernels/ops/layer_norm.py.
// Owns:    up to 1024 features a warp = a row, beyond a block = a row; one block or few on each
//          multiprocessor, which share the rows. Up to 8192 features row and sums of dweight and
//          dbias stay in registers, 16 or 32 elements a thread; longer rows are walked twice (the
//          second time from L2), and the sums lie in memory.
// Traffic: reads dy, z (and dz), writes dx (and dresidual, which differs from dx only under
//          dropout), M*N each; blocks*N float32 for each of dweight and dbias, mostly in L2.
// Sums:    every block leaves its partial sums; of about sqrt(blocks) blocks the last one to arrive
//          adds up theirs, and of these the last one adds up those: in the same launch, in an
//          order that does not depend on who was last. No float atomics.
// Limits:  N <= 65536; float16, bfloat16, float32; sums float32.
// Config:  pick() below; timed on an H200: 1.3 to 3 times Triton's.
// Source:  own work.
#include "layer_norm.h"

namespace tfm_kernels {

struct LayerNormBwd {
  Rows dy, dz, z;            // (M, N); dz may be absent
  Rows weight;               // (N,), may be absent
  const float *mean, *rstd;  // (M,); mean null for RMSNorm
  void *dx, *dresidual;      // (M, N) contiguous of `type`; dresidual null where dx serves for both
  void *dweight, *dbias;     // (N,), either may be null
  DType weight_type, bias_type;
  float* partial;     // (blocks, sums, partial_floats), sums = how many of dweight and dbias
  unsigned* arrived;  // (1 + blocks,) counters
  int64_t rows;
  int n, blocks;
  DType type;  // of z
  bool unbiased, aligned;
  float eps_outside;
  Dropout dropout;
};

int layer_norm_bwd_blocks(int64_t rows, int n);               // on the current device
const char* launch(const LayerNormBwd& args, Stream stream);  // null, or what went wrong

namespace layer_norm_bwd {

using namespace layer_norm;

// The launch for rows of n features: 8 or 16 warps on every multiprocessor, all their registers.
constexpr Config pick(int n) {
  if (n <= 512) return {Shape::warp_512, 512, 1};
  if (n <= 1024) return {Shape::warp_1024, 256, 1};
  if (n > 8192) return {Shape::walk, 512, 1};
  const int threads = (n + 16 * 32 - 1) / (16 * 32) * 32;
  return {Shape::block, threads, 512 / threads};
}

// Of a row's sums, as they lie in memory: whole packs of 16 bytes of `type`.
constexpr int partial_floats(int n, DType type) {
  const int lanes = 16 / kItemSize[static_cast<int>(type)];
  return (n + lanes - 1) / lanes * lanes;
}

}  // namespace layer_norm_bwd
}  // namespace tfm_kernels

#ifdef TFM_KERNEL_HALF
#include "pack.cuh"
#include "partial.cuh"
#include "philox.cuh"

namespace tfm_kernels {
namespace {

// Element i of a parameter's gradient, rounded once; a parameter is of the type T of z or float32.
template <typename T>
__device__ void store_gradient(void* gradient, DType type, int i, float value) {
  if (type == kDType<T>)
    static_cast<T*>(gradient)[i] = static_cast<T>(value);
  else
    static_cast<float*>(gradient)[i] = value;
}

// A thread's partial sums of dweight or dbias.
template <typename T, int packs>
using Sums = float[packs][kLanes<T>];

// g = dy and xhat of row m; what the row lacks has g = 0 and counts nowhere.
template <typename T, int packs>
__device__ void load_row(const LayerNormBwd& args, int64_t m, const Place& place, float mean,
                         float rstd, Sums<T, packs>& g, Sums<T, packs>& xhat) {
  fill(g, [](int, int) { return 0.0f; });
  fill(xhat, [](int, int) { return 0.0f; });
  visit<T, packs>(args.dy, m, place, [&](int k, int i, float dy) { g[k][i] = dy; });
  visit<T, packs>(args.z, m, place, [&](int k, int i, float z) { xhat[k][i] = (z - mean) * rstd; });
}

// LN.4's last term and LN.6.
template <typename T, int packs>
__device__ void store_gradients(const LayerNormBwd& args, int64_t m, const Place& place,
                                Sums<T, packs>& dz) {
  if (args.dz.data)
    visit<T, packs>(args.dz, m, place, [&](int k, int i, float d) { dz[k][i] += d; });
  if (args.dropout.seed) {
    store<T, packs>(static_cast<T*>(args.dresidual) + m * args.n, place, dz);
    drop(args.dropout, m, place, dz);
  }
  store<T, packs>(static_cast<T*>(args.dx) + m * args.n, place, dz);
}

template <typename T, typename Group, int packs, int max_threads, bool walks>
__global__ void __launch_bounds__(max_threads, 1) layer_norm_bwd_kernel(const LayerNormBwd args) {
  constexpr int kEach = kLanes<T>;
  Group group;
  const int distance = group.size() * kEach, end = walks ? args.n : 1;
  const auto place = [&](int start) {
    return Place{start + group.rank() * kEach, distance, args.n, args.aligned};
  };
  const float divisor = static_cast<float>(args.unbiased ? args.n - 1 : args.n);
  const int sums = (args.dweight != nullptr) + (args.dbias != nullptr);
  const Laid<kEach> laid(args.n);
  float* dweights = args.partial + static_cast<int64_t>(blockIdx.x) * sums * laid.floats();
  float* dbiases = args.dweight ? dweights + laid.floats() : dweights;

  Sums<T, packs> dweight, dbias, g, xhat;
  fill(dweight, [](int, int) { return 0.0f; });
  fill(dbias, [](int, int) { return 0.0f; });
  for (int64_t m = group.first(); m < args.rows; m += group.step()) {
    const float mean = args.mean ? args.mean[m] : 0.0f, rstd = args.rstd[m];
    float along = 0.0f, sum = 0.0f;
    for (int start = 0; start < end; start += packs * distance) {
      const Place here = place(start);
      load_row<T>(args, m, here, mean, rstd, g, xhat);
      if (walks) {
        fill(dweight, [&](int k, int i) { return g[k][i] * xhat[k][i]; });
        if (args.dweight) add_to_partial(m == group.first(), here, dweight, dweights);
        if (args.dbias) add_to_partial(m == group.first(), here, g, dbiases);
      } else {
        fill(dweight, [&](int k, int i) { return dweight[k][i] + g[k][i] * xhat[k][i]; });
        fill(dbias, [&](int k, int i) { return dbias[k][i] + g[k][i]; });
      }
      if (args.weight.data)
        visit<T, packs>(args.weight, 0, here, [&](int k, int i, float w) { g[k][i] *= w; });
      along += sum_terms<packs, kEach>([&](int k, int i) { return g[k][i] * xhat[k][i]; });
      sum += sum_terms<packs, kEach>([&](int k, int i) { return g[k][i]; });
    }
    const float share = 1.0f - args.eps_outside * rstd;  // of the root in 1 / rstd
    along = group.sum(along);
    along = share > 0.0f ? along / (divisor * share) : 0.0f;
    sum = args.mean ? group.sum(sum) / static_cast<float>(args.n) : 0.0f;

    for (int start = 0; start < end; start += packs * distance) {
      const Place here = place(start);
      if (walks) {
        load_row<T>(args, m, here, mean, rstd, g, xhat);
        if (args.weight.data)
          visit<T, packs>(args.weight, 0, here, [&](int k, int i, float w) { g[k][i] *= w; });
      }
      fill(g, [&](int k, int i) { return rstd * (g[k][i] - sum - xhat[k][i] * along); });
      store_gradients<T>(args, m, here, g);
    }
  }
  if (!walks) {
    if (args.dweight) leave_partial(group, place(0), dweight, dweights);
    if (args.dbias) leave_partial(group, place(0), dbias, dbiases);
  }
  const int first_bias = args.dweight ? laid.floats() : 0;
  add_blocks(args.partial, args.arrived, sums * laid.floats(), [&](int at, float sum) {
    const bool of_bias = at >= first_bias;
    const int column = laid.column(of_bias ? at - first_bias : at);
    if (column >= args.n) return;
    if (of_bias)
      store_gradient<T>(args.dbias, args.bias_type, column, sum);
    else
      store_gradient<T>(args.dweight, args.weight_type, column, sum);
  });
}

}  // namespace

int layer_norm_bwd_blocks(int64_t rows, int n) {
  const int64_t blocks =
      static_cast<int64_t>(multiprocessors()) * layer_norm_bwd::pick(n).blocks_each;
  return static_cast<int>(rows < blocks ? rows : blocks);
}

const char* launch(const LayerNormBwd& args, Stream stream) {
  using namespace layer_norm_bwd;
  const Config config = pick(args.n);
  return for_dtype(args.type, [&](auto zero) {
    using T = decltype(zero);
    constexpr int kPacks = 16 / kLanes<T>;  // of 16 elements
    auto kernel = layer_norm_bwd_kernel<T, WarpGroup, kPacks, pick(512).threads, false>;
    int shared = config.threads / kWarp * partial_floats(args.n, args.type);
    if (config.shape == Shape::warp_1024)
      kernel = layer_norm_bwd_kernel<T, WarpGroup, 2 * kPacks, pick(1024).threads, false>;
    if (config.shape == Shape::block || config.shape == Shape::walk) {
      kernel = config.shape == Shape::block
                   ? layer_norm_bwd_kernel<T, BlockGroup, kPacks, pick(8192).threads, false>
                   : layer_norm_bwd_kernel<T, BlockGroup, kPacks, pick(8193).threads, true>;
      shared = BlockGroup::kSharedFloats;
    }
    const size_t counters = sizeof(unsigned) * (1 + static_cast<size_t>(args.blocks));
    const char* error = error_words(cudaMemsetAsync(args.arrived, 0, counters, stream));
    if (error != nullptr) return error;
    return start(kernel, args.blocks, config.threads, shared * static_cast<int>(sizeof(float)),
                 stream, args);
  });
}

}  // namespace tfm_kernels

#else  // the binding
#include "binding.h"

namespace tfm_kernels {
namespace {

std::tuple<Tensor, Tensor, Tensor, Tensor> layer_norm_bwd_cuda(
    const Tensor& dy, const OptionalTensor& dz, const Tensor& z, const Tensor& mean,
    const Tensor& rstd, const OptionalTensor& weight, const OptionalTensor& bias,
    double eps_outside, bool rms, bool unbiased, double dropout_p, const OptionalTensor& seed,
    const OptionalTensor& dropout_rows, bool need_weight, bool need_bias) {
  constexpr const char* kOp = "layer_norm_bwd_cuda";
  const int n = check_features(z, layer_norm::kMaxFeatures, kOp, "z");
  const int64_t rows = z.numel() / n;
  const DType type = dtype_of(z, kOp, "z");
  check_like(dy, z, z.sizes(), kOp, "dy");
  check_like(dz, z, z.sizes(), kOp, "dz");
  check_like(weight, z, {n}, kOp, "weight");
  check_like(bias, z, {n}, kOp, "bias");
  check_like(mean, z, {rms ? 0 : rows}, kOp, "mean");
  check_like(rstd, z, {rows}, kOp, "rstd");
  check_type(mean, ScalarType::Float, kOp, "mean");
  check_type(rstd, ScalarType::Float, kOp, "rstd");
  check_beside(dy, type, kOp, "dy");
  check_beside(dz, type, kOp, "dz");
  check_beside(weight, type, kOp, "weight");
  check_beside(bias, type, kOp, "bias");

  const Device device(z);
  const Matrix dy2(dy, n, kOp), dz2(dz, n, kOp), z2(z, n, kOp), w(weight, n, kOp);
  const Tensor mu = torch::stable::contiguous(mean), rs = torch::stable::contiguous(rstd);
  const DropoutRule rule(dropout_p, seed, dropout_rows, z, rows, kOp);
  const bool split = rule.dropout.seed != nullptr;
  Tensor dx = empty(z, z.sizes(), z.scalar_type());
  Tensor dresidual = split ? empty(z, z.sizes(), z.scalar_type()) : empty(z, {0}, z.scalar_type());
  const DType weight_type = dtype_of(weight, rstd, kOp, "weight");
  const DType bias_type = dtype_of(bias, rstd, kOp, "bias");
  Tensor dweight = empty(z, {need_weight ? n : 0}, scalar_type(weight_type));
  Tensor dbias = empty(z, {need_bias ? n : 0}, scalar_type(bias_type));
  if (rows == 0) {
    torch::stable::zero_(dweight);
    torch::stable::zero_(dbias);
    return {dx, dresidual, dweight, dbias};
  }

  LayerNormBwd args{};
  args.blocks = layer_norm_bwd_blocks(rows, n);
  const int64_t sums = static_cast<int64_t>(args.blocks) * layer_norm_bwd::partial_floats(n, type) *
                       (need_weight + need_bias);
  Tensor work = empty(z, {sums + 1 + args.blocks}, ScalarType::Float);
  args.partial = static_cast<float*>(work.mutable_data_ptr());
  args.arrived = reinterpret_cast<unsigned*>(args.partial + sums);
  args.dy = dy2.rows;
  args.dz = dz2.rows;
  args.z = z2.rows;
  args.weight = w.rows;
  args.mean = rms ? nullptr : static_cast<const float*>(mu.const_data_ptr());
  args.rstd = static_cast<const float*>(rs.const_data_ptr());
  args.dx = dx.mutable_data_ptr();
  args.dresidual = split ? dresidual.mutable_data_ptr() : nullptr;
  args.dweight = need_weight ? dweight.mutable_data_ptr() : nullptr;
  args.dbias = need_bias ? dbias.mutable_data_ptr() : nullptr;
  args.weight_type = weight_type;
  args.bias_type = bias_type;
  args.rows = rows;
  args.n = n;
  args.type = type;
  args.unbiased = unbiased;
  args.eps_outside = static_cast<float>(eps_outside);
  args.aligned = aligned(n, type, {dy2.rows, dz2.rows, z2.rows, w.rows});
  args.dropout = rule.dropout;
  check_launch(launch(args, device.stream), kOp);
  return {dx, dresidual, dweight, dbias};
}

TFM_REGISTER(layer_norm_bwd_cuda)

}  // namespace
}  // namespace tfm_kernels
#endif
