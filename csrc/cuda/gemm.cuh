// Products of matrices, tile by tile: what the kernels of gemm.cu, ffn_fwd.cu and ffn_bwd.cu share.
//
// Owns:    a block = 8 or 4 warps and a tile of C, 128 x 128 or 64 x 64, of which a warp sums 64 or
//          32 rows of 32 columns in registers; it takes every gridDim.x-th tile.
// Memory:  three stages of 64 bytes along k of each factor, two of them on their way; where a row
//          does not start at a multiple of 16 bytes, its elements are read one by one.
//          Then each warp lays its sums, 16 rows at a time, where the stages were, and takes
//          them back as packs of 16 bytes of a row: what ends a tile works on packs as norms do.
#pragma once
#include "gemm.h"
#include "tile.cuh"

namespace tfm_kernels {

// How a block works on a tile, whose factors lie in memory as `left` and `right` say.
template <typename Element, Lie left, Lie right, int fragments_m, int warps_n>
struct Tiling {
  using T = Element;
  static constexpr Lie kLeft = left, kRight = right;
  static constexpr int kM = fragments_m, kN = 4;        // fragments of a warp
  static constexpr int kWarpsM = 2, kWarpsN = warps_n;  // warps of a block
  static constexpr int kWarpRows = 16 * kM, kWarpColumns = 8 * kN;
  static constexpr int kRows = kWarpsM * kWarpRows, kColumns = kWarpsN * kWarpColumns;
  static constexpr int kThreads = kWarpsM * kWarpsN * kWarp;
  // half of the registers for 256 threads of 16-bit types, else all of them
  static constexpr int kBlocksEach = (sizeof(T) == 2 ? 512 : 256) / kThreads;
  static constexpr int kDeep = 64 / static_cast<int>(sizeof(T));  // of k in a stage
  static constexpr int kStages = 3;
  static constexpr int kLeftStride = kTileStride<T, (left == Lie::along_k ? kDeep : kRows)>;
  static constexpr int kRightStride = kTileStride<T, (right == Lie::along_k ? kDeep : kColumns)>;
  static constexpr int kLeftSize = kLeftStride * (left == Lie::along_k ? kRows : kDeep);
  static constexpr int kRightSize = kRightStride * (right == Lie::along_k ? kColumns : kDeep);
  static constexpr int kStageSize = kLeftSize + kRightSize;  // elements
  static constexpr int kShared = kStages * kStageSize * static_cast<int>(sizeof(T));
  static constexpr int kLaidStride = kWarpColumns + 8;  // of sums that are laid down
  static_assert(kWarpsM * kWarpsN * 16 * kLaidStride * 4 <= kShared);

  static __device__ int warp() { return static_cast<int>(threadIdx.x) / kWarp; }
  static __device__ int warp_row() { return warp() / kWarpsN * kWarpRows; }
  static __device__ int warp_column() { return warp() % kWarpsN * kWarpColumns; }
};

// A matrix that is multiplied.
template <typename T>
struct Factor {
  const T* data;
  int64_t stride;
  bool packed;  // every row starts at a multiple of 16 bytes

  __device__ explicit Factor(const Rows& rows)
      : data(static_cast<const T*>(rows.data)),
        stride(rows.stride),
        packed(reinterpret_cast<uintptr_t>(rows.data) % 16 == 0 &&
               rows.stride * static_cast<int64_t>(sizeof(T)) % 16 == 0) {}
};

// Begins to copy the first `count` elements (all, if there are more) of a pack; zeros follow.
template <typename T>
__device__ inline void copy_pack(T* target, const T* source, int count, bool packed) {
  const int some = count < 0 ? 0 : count < kLanes<T> ? count : kLanes<T>;
  if (packed) return copy_16(target, source, some * static_cast<int>(sizeof(T)));
  union {
    uint4 word;
    T elements[kLanes<T>];
  };
#pragma unroll
  for (int i = 0; i < kLanes<T>; ++i) elements[i] = i < some ? source[i] : static_cast<T>(0.0f);
  *reinterpret_cast<uint4*>(target) = word;
}

// Begins to copy kLines lines of kWidth elements to a tile. `line(i)` is where line i starts in its
// matrix, null where it has none; `left` is how many elements a line has from there.
template <typename Tiles, int kLines, int kWidth, typename T, typename Line>
__device__ inline void copy_lines(T* tile, int left, bool packed, const Line& line) {
  constexpr int kPacks = kWidth / kLanes<T>;
  static_assert(kLines * kPacks % Tiles::kThreads == 0);
#pragma unroll
  for (int i = 0; i < kLines * kPacks / Tiles::kThreads; ++i) {
    const int number = i * Tiles::kThreads + static_cast<int>(threadIdx.x);
    const int l = number / kPacks, column = number % kPacks * kLanes<T>;
    const T* start = line(l);
    const bool there = start != nullptr;
    copy_pack(tile + l * kTileStride<T, kWidth> + column, there ? start + column : nullptr,
              there ? left - column : 0, packed && there);
  }
}

// Of what is left, as much as a tile takes.
template <int most, typename Index>
__device__ inline int at_most(Index left) {
  return left < most ? static_cast<int>(left) : most;
}

// The rows or columns of a factor that a tile takes: kOuter from `first` on, of `total`.
template <typename T, Lie lie, int kOuter>
struct Strip {
  const T* data;
  int64_t stride;
  int count;
  bool packed;

  __device__ Strip(const Factor<T>& factor, int64_t first, int64_t total)
      : data(factor.data + (lie == Lie::along_k ? first * factor.stride : first)),
        stride(factor.stride),
        count(at_most<kOuter>(total - first)),
        packed(factor.packed) {}

  // Begins to copy k, k + 1, ... of `depth`.
  template <typename Tiles, typename Index>
  __device__ void copy(T* tile, Index k, Index depth) const {
    const int deep = at_most<Tiles::kDeep>(depth - k);
    if constexpr (lie == Lie::along_k)
      copy_lines<Tiles, kOuter, Tiles::kDeep>(
          tile, deep, packed, [&](int l) { return l < count ? data + l * stride + k : nullptr; });
    else
      copy_lines<Tiles, Tiles::kDeep, kOuter>(
          tile, count, packed, [&](int l) { return l < deep ? data + (k + l) * stride : nullptr; });
  }
};

template <typename T, Lie left, Lie right>
using Large = Tiling<T, left, right, 4, 4>;  // tiles of 128 x 128
template <typename T, Lie left, Lie right>
using Small = Tiling<T, left, right, 2, 2>;  // of 64 x 64

template <typename Tiles>
using LeftStrip = Strip<typename Tiles::T, Tiles::kLeft, Tiles::kRows>;
template <typename Tiles>
using RightStrip = Strip<typename Tiles::T, Tiles::kRight, Tiles::kColumns>;

template <typename Tiles>
using Sums = float[Tiles::kM][Tiles::kN][4];  // of a warp

template <typename Tiles>
__device__ inline void clear(Sums<Tiles>& sums) {
#pragma unroll
  for (int m = 0; m < Tiles::kM; ++m) fill(sums[m], [](int, int) { return 0.0f; });
}

// Adds the products of `steps` stages to the warp's sums. copy(left, right, step) begins the copies
// of one stage. A warp without rows or columns is not `busy`. All threads call it; shared memory is
// free after it.
template <typename Tiles, typename Copy>
__device__ inline void product(Sums<Tiles>& sums, int steps, bool busy, const Copy& copy) {
  using T = typename Tiles::T;
  T* memory = reinterpret_cast<T*>(shared_floats());
  const auto begin = [&](int step) {
    T* stage = memory + step % Tiles::kStages * Tiles::kStageSize;
    if (step < steps) copy(stage, stage + Tiles::kLeftSize, step);
    copy_commit();
  };
#pragma unroll
  for (int step = 0; step < Tiles::kStages - 1; ++step) begin(step);
  // float32 is summed in pieces that start from zero: an error grows with the square root of how
  // many numbers follow one another, here 64 products and k / 64 pieces
  constexpr bool kPieces = sizeof(T) == 4;
  constexpr int kPiece = 64 / Tiles::kDeep;  // stages
  Sums<Tiles> piece;
  Sums<Tiles>& running = kPieces ? piece : sums;
  if constexpr (kPieces) clear<Tiles>(piece);
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    copy_wait<Tiles::kStages - 2>();
    __syncthreads();  // this stage is there, and the one before has been read by all
    begin(step + Tiles::kStages - 1);
    if (!busy) continue;
    const T* left = memory + step % Tiles::kStages * Tiles::kStageSize;
    const T* right = left + Tiles::kLeftSize;
#pragma unroll
    for (int k = 0; k < Tiles::kDeep; k += kStep) {
      Left<T> a[Tiles::kM];
#pragma unroll
      for (int m = 0; m < Tiles::kM; ++m)
        load_left<Tiles::kLeft>(a[m], left, Tiles::kLeftStride, Tiles::warp_row() + 16 * m, k);
      multiply_add<Tiles::kRight>(running, a, right, Tiles::kRightStride, Tiles::warp_column(), k);
    }
    if constexpr (kPieces) {
      if (step % kPiece != kPiece - 1 && step != steps - 1) continue;
      add_sums(sums, piece);
      clear<Tiles>(piece);
    }
  }
  copy_wait<0>();
  __syncthreads();
}

// Calls finish(row, column, laid) for every pack of the warp's sums: row and column of the tile,
// and where they are laid down. Of 32 columns the first `width`, 32 or 16, are handed over; the
// same pack of the others lies 16 floats on. A lane always gets the same columns.
template <typename Tiles, typename Finish>
__device__ inline void hand_over(const Sums<Tiles>& sums, int width, const Finish& finish) {
  constexpr int kStride = Tiles::kLaidStride, kEach = kLanes<typename Tiles::T>;
  float* mine = shared_floats() + Tiles::warp() * 16 * kStride;
  constexpr int kPacks = Tiles::kWarpColumns / kEach;
  const bool half = width < Tiles::kWarpColumns;
#pragma unroll 1
  for (int now = 0; now < Tiles::kM; ++now) {
#pragma unroll
    for (int m = 0; m < Tiles::kM; ++m) {  // registers have no index
      if (m != now) continue;
#pragma unroll
      for (int n = 0; n < Tiles::kN; ++n) {
        float* at = mine + lane_row() * kStride + 8 * n + lane_column();
        *reinterpret_cast<float2*>(at) = float2{sums[m][n][0], sums[m][n][1]};
        *reinterpret_cast<float2*>(at + 8 * kStride) = float2{sums[m][n][2], sums[m][n][3]};
      }
    }
    __syncwarp();
#pragma unroll 1
    for (int i = lane_of_warp(); i < (half ? 8 : 16) * kPacks; i += kWarp) {
      const int row = half ? i / (kPacks / 2) : i / kPacks;
      const int column = (half ? i % (kPacks / 2) : i % kPacks) * kEach;
      finish(Tiles::warp_row() + 16 * now + row, column, mine + row * kStride + column);
    }
    __syncwarp();
  }
}

// Row and column of the tile that is the number-th: 8 rows of tiles go together, column by column,
// and find in L2 what they share. 2^31 tiles have 2^43 elements.
struct Spot {
  int m, n;
  __device__ Spot(int number, int tiles_m, int tiles_n) {
    const int group = number / (8 * tiles_n), within = number % (8 * tiles_n);
    const int rows = tiles_m - 8 * group < 8 ? tiles_m - 8 * group : 8;
    m = 8 * group + within % rows, n = within / rows;
  }
};

// Starts the kernel of a Config on as many blocks as run at once.
template <typename Tiles, typename Args>
const char* start_tiles(void (*kernel)(Args), const gemm::Config& config, Stream stream,
                        const Args& args) {
  const int64_t most = static_cast<int64_t>(multiprocessors()) * config.blocks_each;
  const int blocks = static_cast<int>(config.tiles < most ? config.tiles : most);
  return start(kernel, blocks, Tiles::kThreads, Tiles::kShared, stream, args);
}

}  // namespace tfm_kernels
