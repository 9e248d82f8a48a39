// Instructions of sm_80 and later that a warp carries out together, and copies that run beside it.
//
// Fragments are PTX's: lane l stands for row g = l / 4 and columns 2 t, 2 t + 1 with t = l % 4.
//   a (16, 16): a[0] row g, a[1] row g + 8, columns 2 t, 2 t + 1; a[2], a[3] the same 8 columns on
//   b (16, 8):  b[0] rows 2 t, 2 t + 1 of column g, b[1] the same 8 rows on
//   c (16, 8):  c[0], c[1] row g, columns 2 t, 2 t + 1; c[2], c[3] row g + 8
// tests/simt has them as host functions, lane by lane (simt_mma.h).
#pragma once
#include "device.cuh"

#ifdef TFM_SIMT
#include "simt_mma.h"
#endif

namespace tfm_kernels {

#ifndef TFM_SIMT
__device__ inline unsigned shared_address(const void* pointer) {
  return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}
#endif

// c += a b, of 16-bit T, summed in float32.
template <typename T>
__device__ inline void mma_16816(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
#ifdef TFM_SIMT
  simt::mma_16816<T>(c, a, b);
#else
  if constexpr (kDType<T> == DType::f16)
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  else
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}

// Four matrices of 8 rows of 16 bytes; lane l names row l % 8 of matrix l / 8, aligned to 16 bytes
// of shared memory, and gets elements (g, 2 t), (g, 2 t + 1) of each; kTurned: (2 t, g), (2 t + 1,
// g).
template <bool kTurned>
__device__ inline void ldmatrix_x4(uint32_t (&found)[4], const void* row) {
#ifdef TFM_SIMT
  simt::ldmatrix_x4<kTurned>(found, row);
#else
  if constexpr (kTurned)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(found[0]), "=r"(found[1]), "=r"(found[2]), "=r"(found[3])
                 : "r"(shared_address(row)));
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(found[0]), "=r"(found[1]), "=r"(found[2]), "=r"(found[3])
                 : "r"(shared_address(row)));
#endif
}

// Begins a copy of `bytes` (0 to 16) from global to shared memory, both aligned to 16 bytes; zeros
// follow up to 16. It is there after copy_wait() in this thread, and a barrier for others.
__device__ inline void copy_16(void* target, const void* source, int bytes) {
#ifdef TFM_SIMT
  simt::copy_16(target, source, bytes);
#else
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(target)),
               "l"(__cvta_generic_to_global(source)), "r"(bytes)
               : "memory");
#endif
}

// Ends a group: the copies that this thread began since the last one.
__device__ inline void copy_commit() {
#ifdef TFM_SIMT
  simt::copy_commit();
#else
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits for all groups of this thread but the kPending last ones.
template <int kPending>
__device__ inline void copy_wait() {
#ifdef TFM_SIMT
  simt::copy_wait(kPending);
#else
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
#endif
}

}  // namespace tfm_kernels
