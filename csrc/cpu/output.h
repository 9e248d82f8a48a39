// Where large results lie.
#pragma once
#include <ATen/ops/empty.h>

#include <cstdint>

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace tfm_kernels {

// An uninitialised tensor. A large one asks the system for huge pages, as NumPy's arrays do: its
// memory is new, and 33 MB cost 16 ms of page faults before the first byte is stored, 6 ms with
// huge pages (2.6 GHz Xeon, /sys/kernel/mm/transparent_hugepage/enabled: madvise).
inline at::Tensor new_output(at::IntArrayRef sizes, const at::TensorOptions& options) {
  at::Tensor out = at::empty(sizes, options);
#ifdef MADV_HUGEPAGE
  constexpr uintptr_t kLarge = uintptr_t{1} << 22, kPage = 4096;
  if (out.nbytes() >= kLarge) {
    const auto begin = reinterpret_cast<uintptr_t>(out.mutable_data_ptr());
    const uintptr_t first = (begin + kPage - 1) / kPage * kPage;
    // advice: where it is not taken, all stays right
    (void)madvise(reinterpret_cast<void*>(first), begin + out.nbytes() - first, MADV_HUGEPAGE);
  }
#endif
  return out;
}

}  // namespace tfm_kernels
