// The softmax over a tile of scores: maxima, and powers of two with their sums.
#pragma once
#include <bit>
#include <cmath>
#include <limits>

#include "vec.h"

namespace tfm_kernels {

constexpr double kLog2E = 1.4426950408889634;

inline namespace CPU_CAPABILITY {
namespace {

inline float fmadd(float a, float b, float c) { return a * b + c; }

// 2^x for -127 <= x <= 0; V is float or Vec, Bits the whole numbers of its shape.
template <typename Bits, typename V>
V exp2_in_range(V x) {
  const V magic(12582912.0f);  // 1.5 * 2^23: x + magic has the nearest integer in its low bits
  const V shifted = x + magic, r = x - (shifted - magic);
  V p = fmadd(V(1.535336188319500e-4f), r, V(1.339887440266574e-3f));
  p = fmadd(p, r, V(9.618437357674640e-3f));  // Cephes exp2f, |r| <= 1/2
  p = fmadd(p, r, V(5.550332471162809e-2f));
  p = fmadd(p, r, V(2.402264791363012e-1f));
  p = fmadd(p, r, V(6.931472028550421e-1f));
  p = fmadd(p, r, V(1.0f));
  return p * std::bit_cast<V>((std::bit_cast<Bits>(shifted) + Bits(127)) << Bits(23));
}

// 2^x for x <= 0, relative error below 2^-23; 0 below 2^-126.5, NaN stays NaN.
inline float exp2_fast(float x) { return exp2_in_range<uint32_t>(x < -127.0f ? -127.0f : x); }
inline Vec exp2_fast(Vec x) {
  return exp2_in_range<at::vec::Vectorized<int32_t>>(at::vec::clamp_min(x, Vec(-127.0f)));
}
inline double exp2_fast(double x) { return std::exp2(x); }
inline at::vec::Vectorized<double> exp2_fast(at::vec::Vectorized<double> x) { return x.exp2(); }

// The largest of w numbers, w a multiple of 16, but for NaN, which the sum will show.
template <typename C>
C maximum(const C* x, int64_t w) {
  using V = at::vec::Vectorized<C>;
  constexpr int64_t kStep = V::size() < 16 ? 16 : 4 * V::size();
  constexpr int kChains = kStep / V::size();  // of comparisons, each of which waits for its last
  const auto larger = [](const V& p, const V& q) { return at::vec::clamp_min(p, q); };
  V most[kChains];
  for (V& m : most) m = V(-std::numeric_limits<C>::infinity());
  int64_t j = 0;
  for (; j + kStep <= w; j += kStep)
    for (int i = 0; i < kChains; ++i) most[i] = larger(V::loadu(x + j + i * V::size()), most[i]);
  for (; j < w; j += V::size()) most[0] = larger(V::loadu(x + j), most[0]);
  for (int i = 1; i < kChains; ++i) most[0] = larger(most[i], most[0]);
  return at::vec::vec_reduce_all<C>(larger, most[0]);
}

// out = 2^((x - shift) step) over w numbers, w a multiple of 16, rounded once where out is narrower
// than x, as an operand of products; their sum before that. out may be x. The difference comes
// first, so that large scores lose nothing.
template <typename C, typename O>
C exponentials(const C* x, int64_t w, C shift, C step, O* out) {
  using V = at::vec::Vectorized<C>;
  const V shift_v(shift), step_v(step);
  auto one = [&](int64_t j) { return exp2_fast((V::loadu(x + j) - shift_v) * step_v); };
  V s0(C(0)), s1 = s0;
  int64_t j = 0;
  for (; j + 2 * V::size() <= w; j += 2 * V::size()) {
    const V p0 = one(j), p1 = one(j + V::size());
    s0 = s0 + p0;
    s1 = s1 + p1;
    if constexpr (std::is_same_v<O, C>) {
      p0.store(out + j);
      p1.store(out + j + V::size());
    } else {
      operands(p0, p1).store(out + j);
    }
  }
  if (j < w) {
    const V p = one(j);
    s0 = s0 + p;
    if constexpr (std::is_same_v<O, C>)
      p.store(out + j);
    else
      operands(p, p).store(out + j, V::size());
  }
  return at::vec::vec_reduce_all<C>([](const V& p, const V& q) { return p + q; }, s0 + s1);
}

}  // namespace
}  // namespace CPU_CAPABILITY
}  // namespace tfm_kernels
