// What kernels and their launchers need of CUDA: storage types, launches, error words.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <atomic>

#include "launch.h"

namespace tfm_kernels {

// Calls `body` with a value of the element type that `type` names, and returns its answer.
template <typename Body>
auto for_dtype(DType type, Body body) {
  switch (type) {
    case DType::f16:
      return body(__half{});
    case DType::bf16:
      return body(__nv_bfloat16{});
    default:
      return body(float{});
  }
}

template <typename T>
constexpr DType kDType = DType::f32;
template <>
inline constexpr DType kDType<__half> = DType::f16;
template <>
inline constexpr DType kDType<__nv_bfloat16> = DType::bf16;

// The block's shared memory, as large as its launch asked for; aligned to 16 bytes.
__device__ inline float* shared_floats() {
#ifdef TFM_SIMT
  return static_cast<float*>(simt::shared());
#else
  extern __shared__ float4 memory[];
  return reinterpret_cast<float*>(memory);
#endif
}

// One store of 16 bytes to global memory; of a plain one nvcc sometimes makes four.
__device__ inline void store_16(void* address, uint4 word) {
#ifdef TFM_SIMT
  *static_cast<uint4*>(address) = word;
#else
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(address)),
               "r"(word.x), "r"(word.y), "r"(word.z), "r"(word.w)
               : "memory");
#endif
}

inline const char* error_words(cudaError_t error) {  // null for success
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

// Starts a kernel; null, or what went wrong. `shared` is in bytes.
template <typename Args>
const char* start(void (*kernel)(Args), int64_t blocks, int threads, int shared, Stream stream,
                  const Args& args) {
  if (blocks > INT32_MAX) return "more blocks than a launch can have";
  if (shared > 48 << 10) {  // has to be asked for
    const char* error = error_words(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
    if (error != nullptr) return error;
  }
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<size_t>(shared);
  config.stream = stream;
  return error_words(cudaLaunchKernelEx(&config, kernel, args));
}

// Multiprocessors of the current device; 132 where it cannot be asked.
inline int multiprocessors() {
  constexpr int kKept = 64;
  static std::atomic<int> known[kKept];
  int device = 0, count = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return 132;
  if (device < kKept && known[device] > 0) return known[device];
  if (cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device) != cudaSuccess)
    return 132;
  if (device < kKept) known[device] = count;
  return count;
}

}  // namespace tfm_kernels
