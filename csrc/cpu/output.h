// Where large results lie and how they get there.
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

// Whether rows of `out` are best stored past the caches: they are too large to be found there
// later, and each row begins on a whole vector. 32 MB of layer_norm took 2.6 instead of 3.1 ms and
// were summed afterwards as fast; 16 MB took 1.2 instead of 1.5, and their sum 0.55 instead of 0.44
// (Zen 4).
inline bool goes_past_caches(const at::Tensor& out) {
  constexpr size_t kLarge = size_t{1} << 25, kVector = 64;
  return out.nbytes() >= kLarge && out.size(-1) * out.element_size() % kVector == 0 &&
         reinterpret_cast<uintptr_t>(out.const_data_ptr()) % kVector == 0;
}

}  // namespace tfm_kernels
