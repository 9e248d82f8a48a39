// Attention of one query: reading keys and values is all the work, so they are neither packed nor
// turned, and 16 bits are widened on their way into a register. Rows that lie apart are asked for
// ahead; where one follows the other the processor does that better itself (32 x 8 heads of 512
// keys, 64 wide, float32, Zen 3: 3.6 ms asked, 3.1 unasked).
#pragma once
#include <algorithm>
#include <tuple>

#include "attention_fwd.h"
#include "prefetch.h"

namespace tfm_kernels {
inline namespace CPU_CAPABILITY {
namespace {

// x[j] = q . keys[j] over n keys of d elements, `stride` apart, behind which `more` follow; 0 up to
// w, a multiple of 16. A vector of partial sums a key; those of V::size() keys are added up at
// once.
template <typename T, typename C = compute_t<T>>
void dots(const C* q, const T* keys, int64_t stride, int64_t d, int64_t n, int64_t more, int64_t w,
          C* x) {
  using V = at::vec::Vectorized<C>;
  constexpr int64_t kLanes = V::size();
  for (int64_t j = 0; j < w; j += kLanes) {
    const int64_t real = std::clamp<int64_t>(n - j, 0, kLanes);
    V partial[kLanes];
    for (int64_t l = 0; l < kLanes; ++l) partial[l] = V(C(0));
    for (int64_t l = 0; l < real; ++l) {
      const T* key = keys + (j + l) * stride;
      if (stride != d && j + l + kAhead < n + more) prefetch(key + kAhead * stride, d);
      V sum(C(0));
      int64_t e = 0;
      for (; e + kLanes <= d; e += kLanes)
        sum = at::vec::fmadd(V::loadu(q + e), load_wide(key + e), sum);
      if (e < d)
        sum = at::vec::fmadd(V::loadu(q + e, static_cast<int>(d - e)), load_wide(key + e, d - e),
                             sum);
      partial[l] = sum;
    }
    lane_sums(partial).store(x + j);
  }
}

// out[e..] += weights values, kVectors vectors of it in registers, the last of `last` elements.
template <int kVectors, typename T, typename C = compute_t<T>>
void sum_strip(const Blocks& blocks, const C* weights, const T* values, int64_t stride, int64_t e,
               int64_t last, C* out) {
  using V = at::vec::Vectorized<C>;
  const bool apart = stride != kVectors * V::size();
  V sum[kVectors];
  for (int i = 0; i < kVectors; ++i) sum[i] = V::loadu(out + e + i * V::size());
  for (int64_t b = 0; b < blocks.count; ++b) {
    const T* value = values + blocks.first[b] * stride + e;
    const int64_t there = blocks.real[b] + (blocks.goes_on(b) ? blocks.real[b + 1] : 0);
    for (int64_t j = 0; j < blocks.real[b]; ++j, value += stride) {
      const V p(weights[b * kPanel + j]);
      if (apart && j + kAhead < there) prefetch(value + kAhead * stride, kVectors * V::size());
      for (int i = 0; i < kVectors - 1; ++i)
        sum[i] = at::vec::fmadd(p, load_wide(value + i * V::size()), sum[i]);
      const T* end = value + (kVectors - 1) * V::size();
      sum[kVectors - 1] = at::vec::fmadd(
          p, last == V::size() ? load_wide(end) : load_wide(end, last), sum[kVectors - 1]);
    }
  }
  for (int i = 0; i < kVectors; ++i) sum[i].store(out + e + i * V::size());
}

// out += weights values; out (dv) has room for whole vectors, values are those of column 0 and
// after.
template <typename T, typename C = compute_t<T>>
void sum_values(const Blocks& blocks, const C* weights, const T* values, int64_t stride, int64_t dv,
                C* out) {
  constexpr int64_t kLanes = at::vec::Vectorized<C>::size();
  int64_t e = 0;
  for (; e + 8 * kLanes <= dv; e += 8 * kLanes)
    sum_strip<8>(blocks, weights, values, stride, e, kLanes, out);
  for (; e + 4 * kLanes <= dv; e += 4 * kLanes)
    sum_strip<4>(blocks, weights, values, stride, e, kLanes, out);
  for (; e < dv; e += kLanes)
    sum_strip<1>(blocks, weights, values, stride, e, std::min<int64_t>(kLanes, dv - e), out);
}

}  // namespace
}  // namespace CPU_CAPABILITY
}  // namespace tfm_kernels
