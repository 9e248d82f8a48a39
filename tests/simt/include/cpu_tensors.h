// What tests/simt puts in the place of CUDA's side of csrc/cuda/binding.h: kernels are registered
// for CPU tensors, and every tensor that they write lies between protected pages and starts as NaN.
#pragma once
#include <sys/mman.h>

#include <cstdlib>
#include <cstring>
#include <vector>

#define TFM_OWN_EMPTY
#define TFM_REGISTER(name) \
  STABLE_TORCH_LIBRARY_IMPL(tfm_kernels, CPU, m) { m.impl(#name, TORCH_BOX(&name)); }

namespace tfm_kernels {

inline torch::stable::Tensor empty(const torch::stable::Tensor&,
                                   torch::headeronly::IntHeaderOnlyArrayRef sizes,
                                   torch::headeronly::ScalarType type) {
  namespace stable = torch::stable;
  using torch::headeronly::ScalarType;
  std::vector<int64_t> strides(sizes.size());
  int64_t count = 1;
  for (size_t i = sizes.size(); i-- > 0; count *= sizes[i]) strides[i] = count;
  const size_t each = type == ScalarType::Float || type == ScalarType::Int ? 4 : 2;
  const size_t bytes = static_cast<size_t>(count) * each;
  const stable::Device cpu(torch::headeronly::DeviceType::CPU);
#ifdef __SANITIZE_ADDRESS__  // which fences its own allocations
  void* data = std::malloc(bytes);
  std::memset(data, 0xff, bytes);
  return stable::from_blob(data, sizes, strides, cpu, type,
                           [](void* memory) { std::free(memory); });
#else
  constexpr size_t kPage = 4096;
  const size_t pages = (bytes + kPage - 1) / kPage * kPage, whole = pages + 2 * kPage;
  char* base = static_cast<char*>(
      mmap(nullptr, whole, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  STD_TORCH_CHECK(base != MAP_FAILED, "simt: no memory");
  if (pages) STD_TORCH_CHECK(mprotect(base + kPage, pages, PROT_READ | PROT_WRITE) == 0, "simt");
  char* data = base + kPage + pages - bytes;
  std::memset(data, 0xff, bytes);
  return stable::from_blob(data, sizes, strides, cpu, type,
                           [base, whole](void*) { munmap(base, whole); });
#endif
}

}  // namespace tfm_kernels
