// As much of CUDA's language and runtime as csrc/cuda uses, for the host compiler.
#pragma once
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>

#include "simt.h"

#define __global__
#define __device__
#define __launch_bounds__(...)

using dim3 = simt::Dim;
inline const dim3 &threadIdx = simt::thread, &blockIdx = simt::block;
inline const dim3 &blockDim = simt::block_size, &gridDim = simt::grid_size;

struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(8) uint2 {
  uint32_t x, y;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};

inline void __syncthreads() { simt::barrier(); }
inline int __syncthreads_or(int vote) { return simt::barrier(vote != 0); }
inline void __threadfence() { simt::let_others(); }

template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int offset) {
  return simt::shuffle(mask, value, (threadIdx.x % 32) ^ static_cast<unsigned>(offset));
}

template <typename T>
T __shfl_sync(unsigned mask, T value, int lane) {
  return simt::shuffle(mask, value, static_cast<unsigned>(lane) % 32);
}

inline unsigned __ballot_sync(unsigned mask, bool vote) {
  unsigned votes = 0;
  for (unsigned lane = 0; lane < 32; ++lane) votes |= simt::shuffle(mask, vote, lane) << lane;
  return votes;
}

inline void __syncwarp() { simt::exchange(0xffffffffu, 0, 0); }

inline unsigned atomicAdd(unsigned* address, unsigned value) {
  simt::let_others();
  const unsigned before = *address;
  *address = before + value;
  simt::let_others();
  return before;
}

template <typename T>
T __ldcg(const T* address) {
  return *address;
}

enum cudaError_t { cudaSuccess, cudaErrorLaunchFailure };
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount };
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
struct CUstream_st;
using cudaStream_t = CUstream_st*;
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes = 0;
  cudaStream_t stream = nullptr;
};

namespace simt {
inline const char* last_error = nullptr;
inline std::map<void*, size_t> allowed_shared;  // kernels that may have more than 48 KiB
}  // namespace simt

template <typename Kernel>
cudaError_t cudaFuncSetAttribute(Kernel* kernel, cudaFuncAttribute, int bytes) {
  simt::allowed_shared[reinterpret_cast<void*>(kernel)] = static_cast<size_t>(bytes);
  return cudaSuccess;
}

inline const char* cudaGetErrorString(cudaError_t) { return simt::last_error; }

inline cudaError_t cudaGetDevice(int* device) {
  *device = 1 << 20;  // an index whose number of multiprocessors is not kept: tests change it
  return cudaSuccess;
}

inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value = simt::multiprocessors();
  return cudaSuccess;
}

inline cudaError_t cudaMemsetAsync(void* address, int value, size_t bytes, cudaStream_t) {
  std::memset(address, value, bytes);
  return cudaSuccess;
}

template <typename... Parameters, typename... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               const Arguments&... arguments) {
  const auto found = simt::allowed_shared.find(reinterpret_cast<void*>(kernel));
  const size_t allowed = found == simt::allowed_shared.end() ? 48 << 10 : found->second;
  simt::last_error = simt::launch(config->gridDim, config->blockDim, config->dynamicSmemBytes,
                                  allowed, [&] { kernel(arguments...); });
  return simt::last_error ? cudaErrorLaunchFailure : cudaSuccess;
}
