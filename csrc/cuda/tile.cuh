// Products of tiles in shared memory: what a warp multiplies and adds, in steps of 16 along k.
//
// A warp owns sums of kM x kN fragments, 16 kM rows and 8 kN columns, in float32 registers. The
// left factor comes from shared memory or from such sums (as softmax's weights do), the right one
// from shared memory. 16-bit types multiply in tensor cores; float32 in fused multiply-adds of the
// same fragments, each sum in order of k, or in pieces: add_piece(). All lanes call together.
#pragma once
#include "mma.cuh"
#include "pack.cuh"
#include "reduce.cuh"

namespace tfm_kernels {

constexpr int kStep = 16;  // of k, in one product

// How a tile lies in memory: along k, element (row, k) of a left and (column, k) of a right factor
// at row * stride + k; or turned, at k * stride + row.
enum class Lie { along_k, turned };

// Elements from one row of a tile of `columns` (a multiple of 16) to the next: 16 bytes more than a
// row, so that eight rows lie in different banks.
template <typename T, int columns>
constexpr int kTileStride = columns + kLanes<T>;

__device__ inline int lane_of_warp() { return static_cast<int>(threadIdx.x) % kWarp; }
__device__ inline int lane_row() { return lane_of_warp() / 4; }         // and + 8
__device__ inline int lane_column() { return lane_of_warp() % 4 * 2; }  // and + 1

// A left factor, (16, 16). float32 lies as two fragments of sums beside one another do.
template <typename T>
struct Left {
  uint32_t words[4];
};
template <>
struct Left<float> {
  float values[2][4];  // rows g, g + 8; columns 2 t, 2 t + 1, 2 t + 8, 2 t + 9
};

// Rows `row` to row + 15 and k to k + 15 of a tile.
template <Lie lie, typename T>
__device__ inline void load_left(Left<T>& a, const T* tile, int stride, int row, int k) {
  const int lane = lane_of_warp();
  if constexpr (lie == Lie::along_k) {
    ldmatrix_x4<false>(a.words, tile + (row + lane % 16) * stride + k + lane / 16 * 8);
  } else {
    const int from_k = k + lane / 16 * 8 + lane % 8, from_row = row + lane / 8 % 2 * 8;
    ldmatrix_x4<true>(a.words, tile + from_k * stride + from_row);
  }
}

template <Lie lie>
__device__ inline void load_left(Left<float>& a, const float* tile, int stride, int row, int k) {
  const int from = row + lane_row(), along = k + lane_column();
#pragma unroll
  for (int half = 0; half < 2; ++half)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int r = from + half * 8, c = along + i / 2 * 8 + i % 2;
      a.values[half][i] = tile[lie == Lie::along_k ? r * stride + c : c * stride + r];
    }
}

template <typename T>
__device__ inline uint32_t packed(float a, float b) {
  union {
    typename Pair<T>::type pair;
    uint32_t word;
  };
  pair = Pair<T>::of(a, b);
  return word;
}

// Two neighbouring fragments of sums as a left factor, rounded to T.
template <typename T>
__device__ inline void make_left(Left<T>& a, const float (&first)[4], const float (&second)[4]) {
  a.words[0] = packed<T>(first[0], first[1]);
  a.words[1] = packed<T>(first[2], first[3]);
  a.words[2] = packed<T>(second[0], second[1]);
  a.words[3] = packed<T>(second[2], second[3]);
}

__device__ inline void make_left(Left<float>& a, const float (&first)[4],
                                 const float (&second)[4]) {
#pragma unroll
  for (int i = 0; i < 8; ++i)
    a.values[i / 2 % 2][i % 2 + i / 4 * 2] = (i < 4 ? first : second)[i % 4];
}

// Which rows of a turned right tile count: all of them, or those whose bit is set. The others are
// taken as 0, whatever they hold.
struct AllRows {
  __device__ uint32_t mend(uint32_t word, int) const { return word; }
  __device__ float mend(float value, int) const { return value; }
};
struct ChosenRows {
  uint64_t bits;
  // two 16-bit elements, of rows k and k + 1
  __device__ uint32_t mend(uint32_t word, int k) const {
    const uint32_t two = static_cast<uint32_t>(bits >> k);
    return word & ((two & 1 ? 0xffffu : 0u) | (two & 2 ? 0xffff0000u : 0u));
  }
  __device__ float mend(float value, int k) const { return bits >> k & 1 ? value : 0.0f; }
};

// c += a b for columns `column` to column + 8 kN - 1 and k to k + 15 of the right tile. Only the
// first `count` columns are needed: fragments beyond them stay as they are.
template <Lie lie, typename T, int kM, int kN, typename Rows = AllRows>
__device__ inline void multiply_add(float (&c)[kM][kN][4], const Left<T> (&a)[kM], const T* tile,
                                    int stride, int column, int k, int count = 8 * kN,
                                    Rows rows = {}) {
  static_assert(kN % 2 == 0, "two fragments are loaded at once");
  const int lane = lane_of_warp();
#pragma unroll
  for (int n = 0; n < kN; n += 2) {
    if (n * 8 >= count) continue;
    uint32_t found[4];
    if constexpr (lie == Lie::along_k) {
      const int from = column + n * 8 + lane / 16 * 8 + lane % 8, from_k = k + lane / 8 % 2 * 8;
      ldmatrix_x4<false>(found, tile + from * stride + from_k);
    } else {
      const int from_k = k + lane % 16, from = column + n * 8 + lane / 16 * 8;
      ldmatrix_x4<true>(found, tile + from_k * stride + from);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t b[2] = {rows.mend(found[2 * half], k + lane_column()),
                             rows.mend(found[2 * half + 1], k + lane_column() + 8)};
#pragma unroll
      for (int m = 0; m < kM; ++m) mma_16816<T>(c[m][n + half], a[m].words, b);
    }
  }
}

// Columns `four` to four + 3 of a left factor's rows g and g + 8, which four lanes share.
template <int kM>
__device__ inline void spread(float (&left)[kM][2][4], const Left<float> (&a)[kM], int four) {
  const int lane = lane_of_warp();
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        left[m][half][i] = __shfl_sync(0xffffffffu, a[m].values[half][four / 8 * 2 + i % 2],
                                       lane / 4 * 4 + four % 8 / 2 + i / 2);
}

// c[.][n] += left b for columns `column` to column + 7 and k to k + 3 of the right tile.
template <Lie lie, int kM, int kN, typename Rows>
__device__ inline void multiply_four(float (&c)[kM][kN][4], int n, const float (&left)[kM][2][4],
                                     const float* tile, int stride, int column, int k, Rows rows) {
  const int mine = column + lane_column();
  float right[2][4];  // columns 2 t and 2 t + 1
  if constexpr (lie == Lie::along_k) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const float4 word = *reinterpret_cast<const float4*>(tile + (mine + j) * stride + k);
      right[j][0] = word.x, right[j][1] = word.y, right[j][2] = word.z, right[j][3] = word.w;
    }
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 word = *reinterpret_cast<const float2*>(tile + (k + i) * stride + mine);
      right[0][i] = rows.mend(word.x, k + i);
      right[1][i] = rows.mend(word.y, k + i);
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i)
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int e = 0; e < 4; ++e) c[m][n][e] = fmaf(left[m][e / 2][i], right[e % 2][i], c[m][n][e]);
}

template <Lie lie, int kM, int kN, typename Rows = AllRows>
__device__ inline void multiply_add(float (&c)[kM][kN][4], const Left<float> (&a)[kM],
                                    const float* tile, int stride, int column, int k,
                                    int count = 8 * kN, Rows rows = {}) {
#pragma unroll
  for (int four = 0; four < kStep; four += 4) {
    float left[kM][2][4];
    spread(left, a, four);
#pragma unroll
    for (int n = 0; n < kN; ++n)
      if (n * 8 < count)
        multiply_four<lie>(c, n, left, tile, stride, column + n * 8, k + four, rows);
  }
}

// c += piece.
template <int kM, int kN>
__device__ inline void add_sums(float (&c)[kM][kN][4], const float (&piece)[kM][kN][4]) {
#pragma unroll
  for (int i = 0; i < 4 * kM * kN; ++i)
    c[i / 4 / kN][i / 4 % kN][i % 4] += piece[i / 4 / kN][i / 4 % kN][i % 4];
}

// multiply_add(), but what these 16 of k come to is summed from zero before it is added to c: of
// sums of n products, float32 then loses as a chain of 16 and one of n / 16 do, not as one of n.
// Tensor cores sum as they do.
template <Lie lie, typename T, int kM, int kN, typename Rows = AllRows>
__device__ inline void add_piece(float (&c)[kM][kN][4], const Left<T> (&a)[kM], const T* tile,
                                 int stride, int column, int k, int count = 8 * kN,
                                 Rows rows = {}) {
  if constexpr (sizeof(T) == 2) {
    multiply_add<lie>(c, a, tile, stride, column, k, count, rows);
  } else {
    float left[kStep / 4][kM][2][4];
#pragma unroll
    for (int i = 0; i < kStep / 4; ++i) spread(left[i], a, 4 * i);
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      if (n * 8 >= count) continue;
      if (n % 4 == 0) __syncwarp();  // else loads come so early that registers spill
      float piece[kM][1][4] = {};
#pragma unroll
      for (int i = 0; i < kStep / 4; ++i)
        multiply_four<lie>(piece, 0, left[i], tile, stride, column + n * 8, k + 4 * i, rows);
#pragma unroll
      for (int j = 0; j < 4 * kM; ++j) c[j / 4][n][j % 4] += piece[j / 4][0][j % 4];
    }
  }
}

}  // namespace tfm_kernels
