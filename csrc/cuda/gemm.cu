// Products of matrices and sums over rows, CUDA: what the operators of ffn are made of beside their
// own kernels. Implements FFN.4, FFN.7 and the sums of FFN.5 of tfm_kernels/ops/ffn.py.
// Owns:    see gemm.cuh. Where C has few tiles and k is long, k is cut in parts that are summed
//          apart and added up in order. Sums over rows: 32 columns a block, 8 rows at a time.
// Traffic: reads x once a column of tiles and w once a row of tiles, mostly from L2; writes C.
//          2 M N K FLOPs. Sums over rows read their matrix once.
// Limits:  float16, bfloat16, float32; sums float32; float32 is not rounded to TF32. No atomics.
// Config:  gemm::pick() and gemm_splits(); timed on an H200: 1.3 to 3 times Triton's.
// Source:  own work.
#include "gemm.h"

#ifdef TFM_KERNEL_HALF
#include "gemm.cuh"

namespace tfm_kernels {
namespace {

constexpr int kLeastDepth = 512;  // a part of k is not shorter: its sums are written and read again

template <typename Tiles>
__global__ void __launch_bounds__(Tiles::kThreads, Tiles::kBlocksEach)
    gemm_kernel(const Gemm args) {
  using T = typename Tiles::T;
  const Factor<T> x(args.x), w(args.w);
  const int tiles_m = gemm::tiles_of(args.m, Tiles::kRows);
  const int tiles_n = gemm::tiles_of(args.n, Tiles::kColumns), tiles = tiles_m * tiles_n;
  // parts of k start at whole stages
  const int64_t stages = gemm::ceil_div(args.k, Tiles::kDeep);
  const int64_t stages_each = gemm::ceil_div(stages, args.splits);
  const int n = static_cast<int>(args.n);
  const bool aligned = n % kLanes<T> == 0 && reinterpret_cast<uintptr_t>(args.bias.data) % 16 == 0;
  for (int number = blockIdx.x; number < tiles * args.splits; number += gridDim.x) {
    const int part = number / tiles;
    const Spot spot(number % tiles, tiles_m, tiles_n);
    const int64_t m0 = int64_t{spot.m} * Tiles::kRows, n0 = int64_t{spot.n} * Tiles::kColumns;
    const int64_t first = int64_t{part} * stages_each;
    const int64_t last = first + stages_each < stages ? first + stages_each : stages;
    const int steps = last > first ? static_cast<int>(last - first) : 0;
    const bool busy = m0 + Tiles::warp_row() < args.m && n0 + Tiles::warp_column() < args.n;
    Sums<Tiles> sums;
    clear<Tiles>(sums);
    const auto add = [&](const Factor<T>& a, const Factor<T>& b) {
      const LeftStrip<Tiles> rows(a, m0, args.m);
      const RightStrip<Tiles> columns(b, n0, args.n);
      product<Tiles>(sums, steps, busy, [&](T* left, T* right, int step) {
        const int64_t k = (first + step) * Tiles::kDeep;
        rows.template copy<Tiles>(left, k, args.k);
        columns.template copy<Tiles>(right, k, args.k);
      });
    };
    add(x, w);
    if (args.x2.data) add(Factor<T>(args.x2), Factor<T>(args.w2));
    hand_over<Tiles>(sums, Tiles::kWarpColumns, [&](int row, int column, const float* laid) {
      const int64_t m = m0 + row;
      const int64_t at = n0 + Tiles::warp_column() + column;
      if (m >= args.m || at >= args.n) return;
      const Place place{static_cast<int>(at), 0, n, aligned};
      if (args.splits > 1) {
        constexpr int kPacks = kLanes<T> / kLanes<float>;
        float values[kPacks][kLanes<float>];
        fill(values, [&](int k, int i) { return laid[k * kLanes<float> + i]; });
        store<float, kPacks>(args.parts + (int64_t{part} * args.m + m) * n,
                             {place.first, kLanes<float>, n, n % kLanes<float> == 0}, values);
        return;
      }
      float values[1][kLanes<T>];
      load_aligned<float>(laid, values[0]);
      if (args.bias.data)
        visit<T, 1>(args.bias, 0, place, [&](int k, int i, float b) { values[k][i] += b; });
      store<T, 1>(static_cast<T*>(args.c) + m * n, place, values);
    });
    __syncthreads();  // the memory is free for the next tile
  }
}

template <Lie left, Lie right>
const char* launch_form(const Gemm& args, const gemm::Config& config, Stream stream) {
  return for_dtype(args.type, [&](auto zero) {
    using L = Large<decltype(zero), left, right>;
    using S = Small<decltype(zero), left, right>;
    return config.large ? start_tiles<L>(gemm_kernel<L>, config, stream, args)
                        : start_tiles<S>(gemm_kernel<S>, config, stream, args);
  });
}

constexpr int kSumThreads = 256, kSumColumns = kWarp, kSumLines = kSumThreads / kSumColumns;

// Some columns of a run of rows at a time; sum (runs, N) of type Out.
template <typename In, typename Out>
__global__ void __launch_bounds__(kSumThreads, 4) sum_rows_kernel(const SumRows args) {
  const int64_t groups = gemm::ceil_div(args.n, kSumColumns);
  const int64_t each = gemm::ceil_div(args.m, args.runs);
  const int line = static_cast<int>(threadIdx.x) / kSumColumns;
  float* sums = shared_floats();  // (kSumLines, kSumColumns)
  for (int64_t number = blockIdx.x; number < groups * args.runs; number += gridDim.x) {
    const int64_t run = number / groups, first = run * each;
    const int64_t last = first + each < args.m ? first + each : args.m;
    const int64_t column = number % groups * kSumColumns + threadIdx.x % kSumColumns;
    const In* x = static_cast<const In*>(args.x.data) + column;
    float sum = 0.0f;
    if (column < args.n)
#pragma unroll 4
      for (int64_t m = first + line; m < last; m += kSumLines)
        sum += static_cast<float>(x[m * args.x.stride]);
    sums[threadIdx.x] = sum;
    __syncthreads();
    if (line == 0 && column < args.n) {
      for (int other = 1; other < kSumLines; ++other)
        sum += sums[other * kSumColumns + threadIdx.x];
      static_cast<Out*>(args.sum)[run * args.n + column] = static_cast<Out>(sum);
    }
    __syncthreads();  // the memory is free again
  }
}

const char* launch_sums(const SumRows& args, Stream stream) {
  const int64_t groups = gemm::ceil_div(args.n, kSumColumns) * args.runs;
  constexpr int64_t kMostBlocks = 1 << 16;
  const int blocks = static_cast<int>(groups < kMostBlocks ? groups : kMostBlocks);
  constexpr int kShared = kSumThreads * static_cast<int>(sizeof(float));
  return for_dtype(args.x.type, [&](auto in) {
    return for_dtype(args.type, [&](auto out) {
      return start(sum_rows_kernel<decltype(in), decltype(out)>, blocks, kSumThreads, kShared,
                   stream, args);
    });
  });
}

}  // namespace

int gemm_splits(int64_t m, int64_t n, int64_t k) {
  const int64_t tiles = gemm::ceil_div(m, 128) * gemm::ceil_div(n, 128);
  const int64_t most = 2 * static_cast<int64_t>(multiprocessors());
  if (tiles == 0 || tiles >= most) return 1;
  const int64_t parts = most / tiles < k / kLeastDepth ? most / tiles : k / kLeastDepth;
  return parts < 1 ? 1 : static_cast<int>(parts);
}

const char* launch(const Gemm& args, Stream stream) {
  if (args.m == 0 || args.n == 0) return nullptr;
  const gemm::Config config =
      gemm::pick(args.m, args.n, args.type, multiprocessors(), {128, 128}, {64, 64}, args.splits);
  const char* error =
      args.form == Form::x_wt  ? launch_form<Lie::along_k, Lie::along_k>(args, config, stream)
      : args.form == Form::x_w ? launch_form<Lie::along_k, Lie::turned>(args, config, stream)
                               : launch_form<Lie::turned, Lie::turned>(args, config, stream);
  if (error != nullptr || args.splits == 1) return error;
  const int64_t size = args.m * args.n;
  return launch(SumRows{{args.parts, size, DType::f32}, args.c, args.type, args.splits, size},
                stream);
}

// Runs of 256 rows or more, for as many blocks as fill a GPU.
int sum_rows_runs(int64_t m, int64_t n) {
  const int64_t groups = gemm::ceil_div(n, kSumColumns), wanted = groups > 256 ? 1 : m / 256;
  const int64_t most = groups < 1 ? 1 : 256 / groups;
  const int64_t runs = wanted < most ? wanted : most;
  return runs < 1 ? 1 : static_cast<int>(runs);
}

const char* launch(const SumRows& args, Stream stream) {
  if (args.n == 0) return nullptr;
  if (args.parts == nullptr) return launch_sums(args, stream);
  const int runs = sum_rows_runs(args.m, args.n);
  const SumRows first{args.x, args.parts, DType::f32, args.m, args.n, nullptr, runs};
  const SumRows rest{{args.parts, args.n, DType::f32}, args.sum, args.type, runs, args.n};
  const char* error = launch_sums(first, stream);
  return error ? error : launch_sums(rest, stream);
}

}  // namespace tfm_kernels
#endif
