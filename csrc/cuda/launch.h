// What the two halves of every csrc/cuda/*.cu share: plain C++, no torch, no CUDA headers.
//
// setup.py compiles each .cu twice: nvcc sees the kernels and their launcher (TFM_KERNEL_HALF), the
// host compiler sees the binding (the #else). torch's headers cost nvcc five seconds a file, the
// host compiler one. tests/simt compiles both halves with the host compiler.
#pragma once
#include <cstdint>

#ifdef __CUDACC__
#define TFM_KERNEL_HALF
#endif

struct CUstream_st;

namespace tfm_kernels {

using Stream = CUstream_st*;  // cudaStream_t
enum class DType : int { f32, f16, bf16 };

constexpr int kItemSize[] = {4, 2, 2};  // bytes, by DType

// A matrix of `rows` rows with unit stride along them, or a vector (stride 0); null where absent.
struct Rows {
  const void* data = nullptr;
  int64_t stride = 0;  // elements between two rows
  DType type = DType::f32;
};

// The dropout rule of a call; without dropout `seed` is null.
struct Dropout {
  const int64_t* seed = nullptr;  // on the device: no host ever waits for it
  const int64_t* rows = nullptr;  // row numbers of the random rule, null to count from 0
  uint32_t last_dropped = 0;      // ceil(p * 2^32) - 1: draws up to it are dropped
  float scale = 1.0f;             // of what is kept
};

}  // namespace tfm_kernels
