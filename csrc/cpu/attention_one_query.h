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

// How many rows of n elements ahead are asked for: 2 KiB of them, which is what a core has under
// way.
template <typename T>
int64_t rows_ahead(int64_t n) {
  return std::clamp<int64_t>(2048 / (n * sizeof(T)), 4, 16);
}

// x[j] = q . keys[j] over n keys of d elements, `stride` apart, behind which `more` follow; 0 up to
// w, a multiple of 16. A vector of partial sums a key; those of V::size() keys are added up at
// once.
template <typename T, typename C = compute_t<T>>
void dots(const C* q, const T* keys, int64_t stride, int64_t d, int64_t n, int64_t more, int64_t w,
          C* x) {
  using V = at::vec::Vectorized<C>;
  constexpr int64_t kLanes = V::size();
  const int64_t ahead = rows_ahead<T>(d);
  for (int64_t j = 0; j < w; j += kLanes) {
    const int64_t real = std::clamp<int64_t>(n - j, 0, kLanes);
    V partial[kLanes];
    for (int64_t l = 0; l < kLanes; ++l) partial[l] = V(C(0));
    for (int64_t l = 0; l < real; ++l) {
      const T* key = keys + (j + l) * stride;
      if (stride != d && j + l + ahead < n + more) prefetch(key + ahead * stride, d);
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

// out[e..] += weights values, kVectors vectors of it, or one of `rest` elements where not `whole`.
// So many keys at a time that eight sums are formed side by side: an addition waits for the one
// before it.
template <bool whole, int kVectors, typename T, typename C = compute_t<T>>
void sum_strip(const Blocks& blocks, const C* weights, const T* values, int64_t stride, int64_t e,
               int64_t rest, C* out) {
  using V = at::vec::Vectorized<C>;
  static_assert(whole || kVectors == 1);
  constexpr int kKeys = 8 / kVectors, kSums = kKeys * kVectors;
  const bool apart = stride != kVectors * V::size();
  const int64_t ahead = rows_ahead<T>(kVectors * V::size());
  const auto load = [&](const T* from) __attribute__((always_inline)) {
    if constexpr (whole)
      return load_wide(from);
    else
      return load_wide(from, rest);
  };
  auto sum = zeros<V, kSums>();
  for (int64_t b = 0; b < blocks.count; ++b) {
    const T* value = values + blocks.first[b] * stride + e;
    const C* weight = weights + b * kPanel;
    const int64_t real = blocks.real[b];
    const int64_t there = real + (blocks.goes_on(b) ? blocks.real[b + 1] : 0);
    int64_t j = 0;
    for (; j + kKeys <= real; j += kKeys)
#pragma GCC unroll 8
      for (int64_t k = 0; k < kKeys; ++k) {
        const T* row = value + (j + k) * stride;
        if (apart && j + k + ahead < there) prefetch(row + ahead * stride, kVectors * V::size());
        const V p(weight[j + k]);
#pragma GCC unroll 8
        for (int64_t i = 0; i < kVectors; ++i)
          sum[k * kVectors + i] =
              at::vec::fmadd(p, load(row + i * V::size()), sum[k * kVectors + i]);
      }
    for (; j < real; ++j)
#pragma GCC unroll 8
      for (int s = 0; s < kVectors; ++s)
        sum[s] = at::vec::fmadd(V(weight[j]), load(value + j * stride + s * V::size()), sum[s]);
  }
#pragma GCC unroll 8
  for (int s = 0; s < kVectors; ++s) {
#pragma GCC unroll 8
    for (int k = kVectors; k < kSums; k += kVectors) sum[s] = sum[s] + sum[s + k];
    C* place = out + e + s * V::size();
    (V::loadu(place) + sum[s]).store(place);
  }
}

// out += weights values; out (dv) has room for whole vectors, values are those of column 0 and
// after.
template <typename T, typename C = compute_t<T>>
void sum_values(const Blocks& blocks, const C* weights, const T* values, int64_t stride, int64_t dv,
                C* out) {
  constexpr int64_t kLanes = at::vec::Vectorized<C>::size();
  int64_t e = 0;
  for (; e + 8 * kLanes <= dv; e += 8 * kLanes)
    sum_strip<true, 8>(blocks, weights, values, stride, e, 0, out);
  for (; e + 4 * kLanes <= dv; e += 4 * kLanes)
    sum_strip<true, 4>(blocks, weights, values, stride, e, 0, out);
  for (; e + 2 * kLanes <= dv; e += 2 * kLanes)
    sum_strip<true, 2>(blocks, weights, values, stride, e, 0, out);
  for (; e + kLanes <= dv; e += kLanes)
    sum_strip<true, 1>(blocks, weights, values, stride, e, 0, out);
  if (e < dv) sum_strip<false, 1>(blocks, weights, values, stride, e, dv - e, out);
}

}  // namespace
}  // namespace CPU_CAPABILITY
}  // namespace tfm_kernels
