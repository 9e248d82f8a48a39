// c = a b for the tests of csrc/cuda/tile.cuh: factors as they lie or turned, any sizes, by a block
// of two warps. Each step copies the next tiles while it multiplies the last ones.
#include "tile.cuh"

namespace tfm_kernels {
namespace {

constexpr int kRows = 64, kColumns = 32, kWarps = 2, kM = kRows / kWarps / 16, kN = kColumns / 8;

struct Gemm {
  const void *a, *b;       // a (m, k), or (k, m) where turned; b (n, k), or (k, n)
  int a_stride, b_stride;  // from row to row, whole packs of 16 bytes
  float* c;                // (m, n)
  int m, n, k;
  bool a_turned, b_turned;
  uint64_t chosen;  // of k: the bits of each 32 that count, where b is turned
};

constexpr int kK = 32;  // of k, in one tile

// Rows `row` to row + rows - 1 of a matrix (total, width) from column `column` on, 0 where none is.
template <typename T>
__device__ void copy_tile(T* tile, int stride, const T* matrix, int distance, int row, int rows,
                          int total, int column, int columns, int width) {
  const int packs = columns / kLanes<T>;
  for (int i = threadIdx.x; i < rows * packs; i += blockDim.x) {
    const int r = row + i / packs, c = column + i % packs * kLanes<T>;
    const bool there = r < total && c < width;
    const int left = (width - c) * static_cast<int>(sizeof(T));
    copy_16(tile + i / packs * stride + i % packs * kLanes<T>,
            there ? matrix + static_cast<int64_t>(r) * distance + c : matrix,
            there ? (left < 16 ? left : 16) : 0);
  }
}

template <typename T, Lie a_lie, Lie b_lie>
__device__ void gemm(const Gemm& args) {
  constexpr bool a_turned = a_lie == Lie::turned, b_turned = b_lie == Lie::turned;
  constexpr int kAStride = kTileStride<T, (a_turned ? kRows : kK)>;
  constexpr int kBStride = kTileStride<T, (b_turned ? kColumns : kK)>;
  constexpr int kASize = kAStride * (a_turned ? kK : kRows);
  constexpr int kBSize = kBStride * (b_turned ? kK : kColumns);
  T* memory = reinterpret_cast<T*>(shared_floats());
  const int tiles = (args.n + kColumns - 1) / kColumns, warp = threadIdx.x / kWarp;
  const int row = blockIdx.x / tiles * kRows, column = blockIdx.x % tiles * kColumns;
  const auto begin = [&](int k, int stage) {
    T *a = memory + stage * (kASize + kBSize), *b = a + kASize;
    const T *from_a = static_cast<const T*>(args.a), *from_b = static_cast<const T*>(args.b);
    if (a_turned)
      copy_tile(a, kAStride, from_a, args.a_stride, k, kK, args.k, row, kRows, args.m);
    else
      copy_tile(a, kAStride, from_a, args.a_stride, row, kRows, args.m, k, kK, args.k);
    if (b_turned)
      copy_tile(b, kBStride, from_b, args.b_stride, k, kK, args.k, column, kColumns, args.n);
    else
      copy_tile(b, kBStride, from_b, args.b_stride, column, kColumns, args.n, k, kK, args.k);
    copy_commit();
  };
  float c[kM][kN][4] = {};
  begin(0, 0);
  for (int k = 0, stage = 0; k < args.k; k += kK, stage ^= 1) {
    if (k + kK < args.k) {
      begin(k + kK, stage ^ 1);
      copy_wait<1>();
    } else {
      copy_wait<0>();
    }
    __syncthreads();
    const T *a = memory + stage * (kASize + kBSize), *b = a + kASize;
    for (int step = 0; step < kK; step += kStep) {
      Left<T> left[kM];
      for (int m = 0; m < kM; ++m)
        load_left<a_lie>(left[m], a, kAStride, (warp * kM + m) * 16, step);
      if constexpr (b_turned)
        multiply_add<b_lie>(c, left, b, kBStride, 0, step, args.n - column,
                            ChosenRows{args.chosen});
      else
        multiply_add<b_lie>(c, left, b, kBStride, 0, step, args.n - column);
    }
    __syncthreads();  // the tiles may be replaced
  }
  for (int m = 0; m < kM; ++m)
    for (int n = 0; n < kN; ++n)
      for (int e = 0; e < 4; ++e) {
        const int r = row + (warp * kM + m) * 16 + lane_row() + e / 2 * 8;
        const int col = column + n * 8 + lane_column() + e % 2;
        if (r < args.m && col < args.n) args.c[static_cast<int64_t>(r) * args.n + col] = c[m][n][e];
      }
}

template <typename T>
__global__ void gemm_kernel(const Gemm args) {
  if (args.a_turned && args.b_turned)
    gemm<T, Lie::turned, Lie::turned>(args);
  else if (args.a_turned)
    gemm<T, Lie::turned, Lie::along_k>(args);
  else if (args.b_turned)
    gemm<T, Lie::along_k, Lie::turned>(args);
  else
    gemm<T, Lie::along_k, Lie::along_k>(args);
}

}  // namespace
}  // namespace tfm_kernels

// Null, or what went wrong.
extern "C" __attribute__((visibility("default"))) const char* simt_gemm(
    int type, const void* a, const void* b, int a_stride, int b_stride, float* c, int m, int n,
    int k, int a_turned, int b_turned, uint64_t chosen) {
  using namespace tfm_kernels;
  const Gemm args{a, b, a_stride, b_stride, c, m, n, k, a_turned != 0, b_turned != 0, chosen};
  return for_dtype(static_cast<DType>(type), [&](auto zero) {
    using T = decltype(zero);
    const int blocks = (m + kRows - 1) / kRows * ((n + kColumns - 1) / kColumns);
    const int shared =
        2 * static_cast<int>(sizeof(T)) * (kRows * kTileStride<T, kK> + kK * kTileStride<T, kRows>);
    return start(gemm_kernel<T>, blocks, kWarps * kWarp, shared, nullptr, args);
  });
}
