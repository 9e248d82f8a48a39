// Sums over rows that many blocks share, such as dweight: each block leaves partial sums in memory,
// and the last ones to arrive add them up in the same launch, in an order that does not depend on
// who was last. Of about sqrt(blocks) blocks the last one adds up theirs, and of these the last one
// adds up those, so that no multiprocessor has to read everything.
#pragma once
#include "pack.cuh"
#include "reduce.cuh"

namespace tfm_kernels {

// How the sums of a row of n columns lie: element i of pack p at i * packs + p, where neighbouring
// threads write neighbouring floats and in shared memory no two write to a bank. Whole packs: what
// the row lacks of the last one is 0.
template <int lanes>
struct Laid {
  int packs;

  __device__ explicit Laid(int n) : packs((n + lanes - 1) / lanes) {}
  __device__ int floats() const { return lanes * packs; }
  __device__ int column(int at) const { return at % packs * lanes + at / packs; }

  // keep(at, k, i) for the elements of a thread's packs.
  template <int kPacks, typename Keep>
  __device__ void visit(const Place& place, const Keep& keep) const {
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      const int pack = (place.first + k * place.distance) / lanes;
      if (pack >= packs) continue;
#pragma unroll
      for (int i = 0; i < lanes; ++i) keep(i * packs + pack, k, i);
    }
  }
};

// Adds up what the warps of a block hold of the same columns, warp by warp, in a row of shared
// memory each.
template <int packs, int lanes>
__device__ inline void leave_partial(const WarpGroup&, const Place& place,
                                     const float (&sums)[packs][lanes], float* partial) {
  const Laid<lanes> laid(place.n);
  float* memory = shared_floats();
  const int warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp, floats = laid.floats();
  laid.template visit<packs>(
      place, [&](int at, int k, int i) { memory[warp * floats + at] = sums[k][i]; });
  __syncthreads();
  for (int at = threadIdx.x; at < floats; at += blockDim.x) {
    float sum = memory[at];
    for (int other = 1; other < warps; ++other) sum += memory[other * floats + at];
    partial[at] = sum;
  }
  __syncthreads();  // the memory is free again
}

// A block that works on a row as a whole holds each column once.
template <int packs, int lanes>
__device__ inline void leave_partial(const BlockGroup&, const Place& place,
                                     const float (&sums)[packs][lanes], float* partial) {
  Laid<lanes>(place.n).template visit<packs>(
      place, [&](int at, int k, int i) { partial[at] = sums[k][i]; });
}

// The same where the sums lie in memory from the start: a block's first row begins them.
template <int packs, int lanes>
__device__ inline void add_to_partial(bool begins, const Place& place,
                                      const float (&terms)[packs][lanes], float* partial) {
  Laid<lanes>(place.n).template visit<packs>(place, [&](int at, int k, int i) {
    partial[at] = begins ? terms[k][i] : partial[at] + terms[k][i];
  });
}

// Sums over `count` rows of `width` floats that lie `distance` apart, in order, past L1:
// keep(at, sum).
template <typename Keep>
__device__ inline void add_rows(const float* rows, int64_t distance, int count, int width,
                                const Keep& keep) {
  for (int at = threadIdx.x; at < width; at += blockDim.x) {
    float sum = 0.0f;
#pragma unroll 8
    for (int row = 0; row < count; ++row) sum += __ldcg(rows + row * distance + at);
    keep(at, sum);
  }
}

// keep(at, sum) of the sums over all blocks of partial (blocks, width). `arrived` is 1 + blocks
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
  add_rows(sum, width, count, width, [&](int at, float all) { sum[at] = all; });
  if (!last_to_arrive(arrived, groups)) return;
  add_rows(partial, static_cast<int64_t>(each) * width, groups, width, keep);
}

}  // namespace tfm_kernels
