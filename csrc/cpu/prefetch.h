// Asking for rows before they are used. Rows of a matrix often lie pages apart, where the processor
// does not guess the next one.
#pragma once
#include <cstdint>

namespace tfm_kernels {
inline namespace CPU_CAPABILITY {
namespace {

constexpr int64_t kAhead = 8;  // rows
template <typename T>
constexpr int64_t kLine = 64 / sizeof(T);  // elements of a cache line

// Asks for n elements that will be read soon.
template <typename T>
void prefetch(const T* row, int64_t n) {
  for (int64_t i = 0; i < n; i += kLine<T>) __builtin_prefetch(row + i);
}

}  // namespace
}  // namespace CPU_CAPABILITY
}  // namespace tfm_kernels
