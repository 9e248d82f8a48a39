// Sums over rows that many blocks share, such as dweight: each block leaves partial sums in memory,
// and the last ones to arrive add them up in the same launch, in an order that does not depend on
// who was last. Of about sqrt(blocks) blocks the last one adds up theirs, and of these the last one
// adds up those, so that no multiprocessor has to read everything.
#pragma once
#include "pack.cuh"
#include "reduce.cuh"

namespace tfm_kernels {

// Adds up what the warps of a block hold of the same columns, warp by warp, in warps * n floats of
// shared memory.
template <int packs, int lanes>
__device__ inline void leave_partial(const WarpGroup&, const Place& place,
                                     const float (&sums)[packs][lanes], float* partial) {
  float* memory = shared_floats();  // (warps, n)
  const int warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
#pragma unroll
  for (int k = 0; k < packs; ++k)
#pragma unroll
    for (int i = 0; i < lanes; ++i) {
      const int column = place.first + k * place.distance + i;
      if (column < place.n) memory[warp * place.n + column] = sums[k][i];
    }
  __syncthreads();
  for (int column = threadIdx.x; column < place.n; column += blockDim.x) {
    float sum = memory[column];
    for (int other = 1; other < warps; ++other) sum += memory[other * place.n + column];
    partial[column] = sum;
  }
  __syncthreads();  // the memory is free again
}

// A block that works on a row as a whole holds each column once.
template <int packs, int lanes>
__device__ inline void leave_partial(const BlockGroup&, const Place& place,
                                     const float (&sums)[packs][lanes], float* partial) {
#pragma unroll
  for (int k = 0; k < packs; ++k)
#pragma unroll
    for (int i = 0; i < lanes; ++i) {
      const int column = place.first + k * place.distance + i;
      if (column < place.n) partial[column] = sums[k][i];
    }
}

// The same where the sums lie in memory from the start: a block's first row begins them.
template <int packs, int lanes>
__device__ inline void add_to_partial(bool begins, const Place& place,
                                      const float (&terms)[packs][lanes], float* partial) {
#pragma unroll
  for (int k = 0; k < packs; ++k)
#pragma unroll
    for (int i = 0; i < lanes; ++i) {
      const int column = place.first + k * place.distance + i;
      if (column < place.n) partial[column] = begins ? terms[k][i] : partial[column] + terms[k][i];
    }
}

// Sums over `count` rows of `width` columns that lie `distance` apart, in order, past L1:
// keep(column, sum).
template <typename Keep>
__device__ inline void add_rows(const float* rows, int64_t distance, int count, int width,
                                const Keep& keep) {
  for (int column = threadIdx.x; column < width; column += blockDim.x) {
    float sum = 0.0f;
#pragma unroll 8
    for (int row = 0; row < count; ++row) sum += __ldcg(rows + row * distance + column);
    keep(column, sum);
  }
}

// keep(column, sum) of the sums over all blocks of partial (blocks, width). `arrived` is 1 + blocks
// zeros. All threads of all blocks call it once.
template <typename Keep>
__device__ inline void add_blocks(float* partial, unsigned* arrived, int width, const Keep& keep) {
  if (width == 0) return;
  const int blocks = gridDim.x, block = blockIdx.x;
  int each = 1;
  while (each * each < blocks) ++each;
  const int groups = (blocks + each - 1) / each, group = block / each, first = group * each;
  const int count = blocks - first < each ? blocks - first : each;
  if (!last_to_arrive(arrived + 1 + group, count)) return;
  float* sum = partial + static_cast<int64_t>(first) * width;
  add_rows(sum, width, count, width, [&](int column, float all) { sum[column] = all; });
  if (!last_to_arrive(arrived, groups)) return;
  add_rows(partial, static_cast<int64_t>(each) * width, groups, width, keep);
}

}  // namespace tfm_kernels
