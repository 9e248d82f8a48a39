// Sums over the threads that share a row, and who they are. Every order is fixed.
#pragma once
#include "device.cuh"

namespace tfm_kernels {

constexpr int kWarp = 32;

// The sum over a warp, the same bits in every lane.
__device__ inline float warp_sum(float value) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2)
    value += __shfl_xor_sync(0xffffffffu, value, offset);
  return value;
}

// A warp works on a row of its own; a block's warps share nothing.
struct WarpGroup {
  static constexpr int kSharedFloats = 0;

  // rows are dealt to blocks first, so that few rows still reach every multiprocessor
  __device__ int64_t first() const {
    return static_cast<int64_t>(threadIdx.x / kWarp) * gridDim.x + blockIdx.x;
  }
  __device__ int64_t step() const { return static_cast<int64_t>(blockDim.x / kWarp) * gridDim.x; }
  __device__ int rank() const { return static_cast<int>(threadIdx.x) % kWarp; }
  __device__ int size() const { return kWarp; }
  __device__ float sum(float value) { return warp_sum(value); }
};

// A block works on a row.
class BlockGroup {
 public:
  static constexpr int kSharedFloats = 2 * kWarp;

  __device__ int64_t first() const { return blockIdx.x; }
  __device__ int64_t step() const { return gridDim.x; }
  __device__ int rank() const { return static_cast<int>(threadIdx.x); }
  __device__ int size() const { return static_cast<int>(blockDim.x); }

  // One barrier a sum: the two halves of the memory take turns, so a warp that is already at the
  // next sum writes where nobody reads any more.
  __device__ float sum(float value) {
    float* partial = shared_floats() + turn_ * kWarp;
    turn_ ^= 1;
    const int warp = rank() / kWarp, lane = rank() % kWarp, warps = size() / kWarp;
    value = warp_sum(value);
    if (lane == 0) partial[warp] = value;
    __syncthreads();
    return warp_sum(lane < warps ? partial[lane] : 0.0f);
  }

 private:
  int turn_ = 0;
};

// Whether this block is the last of `blocks` that come here; all that the others wrote before they
// came can then be read (past L1, by __ldcg). `counter` starts at 0. All threads must call it.
__device__ inline bool last_to_arrive(unsigned* counter, unsigned blocks) {
  __syncthreads();
  float* ticket = shared_floats();
  if (threadIdx.x == 0) {
    __threadfence();  // a fence holds for what came before it, which by the barrier is the block's
    const bool last = atomicAdd(counter, 1u) == blocks - 1;
    ticket[0] = last ? 1.0f : 0.0f;
    if (last) __threadfence();
  }
  __syncthreads();
  const bool last = ticket[0] != 0.0f;
  __syncthreads();  // the memory is free again
  return last;
}

}  // namespace tfm_kernels
