// What the attention kernels share: the call as raw pointers, which keys and rows meet, and the
// rows' extras.
//
// Plain C++, no torch header beyond at::vec.
#pragma once
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "gemm.h"
#include "isa.h"
#include "philox.h"
#include "vec.h"

namespace tfm_kernels {

// A (B, H, T, D) tensor, or (total, H, D) with stride_b 0; strides in elements. No data: absent.
struct AttentionView {
  const void* data = nullptr;
  int64_t stride_b = 0, stride_h = 0, stride_t = 0, stride_d = 0;
};

struct AttentionArgs {
  AttentionView q, k, v;       // one storage type
  AttentionView bias, keep;    // (B, H, Tq, Tk), 0 strides where broadcast; keep holds bytes
  bool bias_is_float = false;  // float32 though the storage type is narrower
  const int64_t* key_lengths = nullptr;                            // (B), or null
  const int64_t *cu_seqlens_q = nullptr, *cu_seqlens_k = nullptr;  // (B + 1), or null: dense
  int64_t batch = 0, heads = 0, kv_heads = 0, queries = 0, keys = 0, d = 0, dv = 0;
  int64_t low = 0, high = 0, end_low = 0, end_high = 0;  // the bands of the two corners
  int64_t lse_stride_b = 0, lse_stride_h = 0;
  double scale = 1.0;
  Dropout dropout;
  int64_t row_step = 0;  // dropout rows per head
};

// One sequence of the batch, with its band measured from its top-left corner.
struct Sequence {
  int64_t b, q0, k0;     // first row of the sequence in its view (packed calls)
  int64_t tq, tk, live;  // live: keys below key_lengths
  int64_t low, high;
};

inline Sequence sequence_of(const AttentionArgs& a, int64_t b) {
  Sequence s{b, 0, 0, a.queries, a.keys, a.keys, a.low, a.high};
  if (a.cu_seqlens_q) {
    s.q0 = a.cu_seqlens_q[b];
    s.k0 = a.cu_seqlens_k[b];
    s.tq = a.cu_seqlens_q[b + 1] - s.q0;
    s.live = s.tk = a.cu_seqlens_k[b + 1] - s.k0;
  }
  if (a.key_lengths) s.live = std::clamp<int64_t>(a.key_lengths[b], 0, s.tk);
  s.low = std::max(s.low, a.end_low + s.tk - s.tq);
  s.high = std::min(s.high, a.end_high + s.tk - s.tq);
  return s;
}

inline namespace CPU_CAPABILITY {
namespace {

constexpr int64_t kPanel = 64;  // columns of a matrix panel: brgemm runs 64 wide at 130 to 145
                                // GFLOP/s where 128 and more reach 90 to 110 (Cascade Lake)

inline int64_t round_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

// The first element of head h of sequence s.
template <typename T>
const T* at_head(const AttentionView& view, const Sequence& s, int64_t h, int64_t row) {
  return static_cast<const T*>(view.data) + s.b * view.stride_b + h * view.stride_h +
         row * view.stride_t;
}

// 2^x for x <= 0, relative error below 2^-23; 0 below 2^-126.5, NaN stays NaN.
inline float exp2_fast(float x) {
  x = x < -127.0f ? -127.0f : x;
  const float shifted = x + 12582912.0f;  // 1.5 * 2^23: the low bits now hold the nearest integer
  const float r = x - (shifted - 12582912.0f);
  float p = 1.535336188319500e-4f;  // Cephes exp2f, |r| <= 1/2
  p = p * r + 1.339887440266574e-3f;
  p = p * r + 9.618437357674640e-3f;
  p = p * r + 5.550332471162809e-2f;
  p = p * r + 2.402264791363012e-1f;
  p = p * r + 6.931472028550421e-1f;
  p = p * r + 1.0f;
  return p * std::bit_cast<float>((std::bit_cast<uint32_t>(shifted) + 127u) << 23);
}
inline double exp2_fast(double x) { return std::exp2(x); }
inline Vec exp2_fast(Vec x) {  // the same, lane by lane
  x = at::vec::clamp_min(x, Vec(-127.0f));
  const Vec magic(12582912.0f), shifted = x + magic, r = x - (shifted - magic);
  Vec p = at::vec::fmadd(Vec(1.535336188319500e-4f), r, Vec(1.339887440266574e-3f));
  p = at::vec::fmadd(p, r, Vec(9.618437357674640e-3f));
  p = at::vec::fmadd(p, r, Vec(5.550332471162809e-2f));
  p = at::vec::fmadd(p, r, Vec(2.402264791363012e-1f));
  p = at::vec::fmadd(p, r, Vec(6.931472028550421e-1f));
  p = at::vec::fmadd(p, r, Vec(1.0f));
  using Bits = at::vec::Vectorized<int32_t>;
  return p * std::bit_cast<Vec>((std::bit_cast<Bits>(shifted) + Bits(127)) << Bits(23));
}
inline at::vec::Vectorized<double> exp2_fast(at::vec::Vectorized<double> x) { return x.exp2(); }

// float64 has no matrix library here: it exists to check gradients.
inline void gemm_tile(int64_t m, int64_t n, int64_t k, const double* a, int64_t lda,
                      const double* b, int64_t ldb, double* c, int64_t ldc, bool accumulate) {
  for (int64_t i = 0; i < m; ++i) {
    if (!accumulate) std::fill_n(c + i * ldc, n, 0.0);
    for (int64_t l = 0; l < k; ++l)
      for (int64_t j = 0; j < n; ++j) c[i * ldc + j] += a[i * lda + l] * b[l * ldb + j];
  }
}
using tfm_kernels::gemm_tile;

// out[j, i] = in[i, j], in (m, n).
template <typename C>
void transpose(int64_t m, int64_t n, const C* in, int64_t ld_in, C* out, int64_t ld_out) {
  for (int64_t i = 0; i < m; i += 16)
    for (int64_t j = 0; j < n; j += 16)
      at::vec::transpose_mxn<C>(in + i * ld_in + j, ld_in, out + j * ld_out + i, ld_out,
                                static_cast<int>(std::min<int64_t>(16, m - i)),
                                static_cast<int>(std::min<int64_t>(16, n - j)));
}

// out[i] = in[i * stride], widened.
template <typename T, typename C>
void load_row(const T* in, int64_t stride, int64_t n, C* out) {
  if (stride == 1 && std::is_same_v<C, compute_t<T>>) {
    if constexpr (std::is_same_v<C, compute_t<T>>) widen(in, n, out);
  } else {
    for (int64_t i = 0; i < n; ++i) out[i] = static_cast<C>(in[i * stride]);
  }
}

// Asks for n elements that will be read soon. Rows of a head lie far apart, so that the processor
// does not guess the next one.
template <typename T>
void prefetch(const T* row, int64_t n) {
  for (int64_t i = 0; i < n; i += 64 / static_cast<int64_t>(sizeof(T))) __builtin_prefetch(row + i);
}
constexpr int64_t kAhead = 8;  // rows

// in[i] to out[i * stride], rounded once.
template <typename T>
void store_row(const compute_t<T>* in, int64_t n, T* out, int64_t stride) {
  if (stride == 1)
    narrow(in, n, out);
  else
    for (int64_t i = 0; i < n; ++i) out[i * stride] = static_cast<T>(in[i]);
}

// The keys of one head that some row sees, in order: the columns of its matrices.
struct Columns {
  int64_t first = 0, range = 0;    // the keys that band and lengths leave
  int64_t count = 0;               // columns
  const int32_t* index = nullptr;  // column -> key where keys were left out, else first + column
  const int32_t* rank = nullptr;   // key - first -> column, (range + 1), beside index
  const uint8_t* alive = nullptr;  // by key - first, where dead keys stay in as zeros
  bool elementwise = false;        // keep must be asked for single pairs

  int64_t key(int64_t c) const { return index ? index[c] : first + c; }
  // The first column whose key is >= j.
  int64_t from(int64_t j) const {
    const int64_t offset = std::clamp<int64_t>(j - first, 0, range);
    return rank ? rank[offset] : offset;
  }
};

struct ColumnScratch {
  uint8_t* alive;         // (Tk)
  int32_t *index, *rank;  // (Tk), (Tk + 1)
};

// Whether none of n elements is NaN or infinite: none has all exponent bits set.
template <typename T>
bool finite_row(const T* p, int64_t stride, int64_t n) {
  using Bits = std::conditional_t<sizeof(T) == 8, uint64_t,
                                  std::conditional_t<sizeof(T) == 4, uint32_t, uint16_t>>;
  constexpr Bits kExponent = std::is_same_v<T, double>  ? static_cast<Bits>(0x7FF0000000000000u)
                             : std::is_same_v<T, float> ? static_cast<Bits>(0x7F800000u)
                             : std::is_same_v<T, f16_t> ? static_cast<Bits>(0x7C00u)
                                                        : static_cast<Bits>(0x7F80u);
  const Bits* bits = reinterpret_cast<const Bits*>(p);
  Bits found = 0;
  if (stride == 1)
    for (int64_t i = 0; i < n; ++i) found |= (bits[i] & kExponent) == kExponent;
  else
    for (int64_t i = 0; i < n; ++i) found |= (bits[i * stride] & kExponent) == kExponent;
  return !found;
}

template <typename T>
bool hides(const AttentionArgs& a, const Sequence& s, int64_t h, int64_t i, int64_t j) {
  if (!a.bias.data) return false;
  const int64_t at =
      s.b * a.bias.stride_b + h * a.bias.stride_h + i * a.bias.stride_t + j * a.bias.stride_d;
  return (a.bias_is_float ? static_cast<const float*>(a.bias.data)[at]
                          : static_cast<float>(static_cast<const T*>(a.bias.data)[at])) ==
         -std::numeric_limits<float>::infinity();
}

// Finds the columns of head h. Keys that no row may see are left out, or marked where leaving them
// out would cost more than it saves; keys hidden by a bias of -inf alone matter only where they
// hold NaN or infinity, so only those are looked for.
template <typename T>
Columns find_columns(const AttentionArgs& a, const Sequence& s, int64_t h, ColumnScratch scratch) {
  Columns c;
  c.first = std::clamp<int64_t>(s.low, 0, s.tk);
  c.range = std::max<int64_t>(0, std::min(s.live, s.tq + s.high) - c.first);
  if (s.tq == 0 || s.low > s.high) c.range = 0;
  c.count = c.range;
  if (c.range == 0 || (!a.keep.data && !a.bias.data)) return c;

  uint8_t* alive = scratch.alive;
  std::memset(alive, a.keep.data ? 0 : 1, c.range);
  if (a.keep.data) {
    const uint8_t* keep = at_head<uint8_t>(a.keep, s, h, 0);
    const int64_t rows = a.keep.stride_t == 0 ? 1 : s.tq, step = a.keep.stride_d;
    for (int64_t i = 0; i < rows; ++i) {
      int64_t begin = c.first, end = c.first + c.range;
      if (rows > 1) {
        begin = std::max(begin, i + s.low);
        end = std::min(end, i + s.high + 1);
      }
      const uint8_t* row = keep + i * a.keep.stride_t;
      if (step == 1)
        for (int64_t j = begin; j < end; ++j) alive[j - c.first] |= row[j];
      else
        for (int64_t j = begin; j < end; ++j) alive[j - c.first] |= row[j * step];
    }
  }
  if (a.bias.data) {
    const int64_t kv = h / (a.heads / a.kv_heads);
    for (int64_t j = c.first; j < c.first + c.range; ++j) {
      uint8_t& mark = alive[j - c.first];
      if (!mark || (finite_row(at_head<T>(a.k, s, kv, s.k0 + j), a.k.stride_d, a.d) &&
                    finite_row(at_head<T>(a.v, s, kv, s.k0 + j), a.v.stride_d, a.dv)))
        continue;
      mark = 0;
      for (int64_t i = std::max<int64_t>(0, j - s.high); i < std::min(s.tq, j - s.low + 1); ++i) {
        const bool kept = !a.keep.data || at_head<uint8_t>(a.keep, s, h, i)[j * a.keep.stride_d];
        if (kept && !hides<T>(a, s, h, i, j)) mark = 1;
      }
    }
  }
  int32_t count = 0;
  for (int64_t j = 0; j < c.range; ++j) {
    scratch.rank[j] = count;
    if (alive[j]) scratch.index[count++] = static_cast<int32_t>(c.first + j);
  }
  scratch.rank[c.range] = count;
  c.elementwise = a.keep.data && a.keep.stride_t != 0 && a.keep.stride_d != 0;
  if (count == c.range) return c;
  const bool gathers = a.bias.data || a.dropout.active() || c.elementwise;
  if (!gathers || count <= c.range * 3 / 4) {
    c.count = count;
    c.index = scratch.index;
    c.rank = scratch.rank;
  } else {
    c.alive = alive;
    c.elementwise = a.keep.data != nullptr;
  }
  return c;
}

// Columns begin..begin+n-1 of a row of something per pair (bias, keep) as contiguous C.
template <typename S, typename C>
void gather(const Columns& columns, const S* row, int64_t stride, int64_t begin, int64_t n,
            C* out) {
  if (columns.index)
    for (int64_t j = 0; j < n; ++j) out[j] = static_cast<C>(row[columns.index[begin + j] * stride]);
  else
    load_row(row + (columns.first + begin) * stride, stride, n, out);
}

// x[j] += bias over columns begin..begin+n-1 of row i, and -inf at pairs that bias or keep hide.
// x holds scale * q k^T there.
template <typename T, typename C = compute_t<T>>
void add_extras(const AttentionArgs& a, const Sequence& s, int64_t h, const Columns& columns,
                int64_t i, int64_t begin, int64_t n, C* x) {
  constexpr C kHidden = -std::numeric_limits<C>::infinity();
  alignas(64) C bias[kPanel];
  alignas(64) uint8_t keep[kPanel];
  for (int64_t done = 0; done < n; done += kPanel, x += kPanel, begin += kPanel) {
    const int64_t m = std::min(kPanel, n - done);
    if (a.bias.data) {
      auto take = [&](const auto* row) {
        if (a.bias.stride_t && a.bias.stride_d == 1 && !columns.index && i + kAhead < s.tq)
          prefetch(row + kAhead * a.bias.stride_t + columns.first + begin, m);
        gather(columns, row, a.bias.stride_d, begin, m, bias);
      };
      if (a.bias_is_float)
        take(at_head<float>(a.bias, s, h, i));
      else
        take(at_head<T>(a.bias, s, h, i));
      for (int64_t j = 0; j < m; ++j) x[j] = bias[j] == kHidden ? kHidden : x[j] + bias[j];
    }
    if (columns.elementwise) {
      gather(columns, at_head<uint8_t>(a.keep, s, h, i), a.keep.stride_d, begin, m, keep);
      for (int64_t j = 0; j < m; ++j) x[j] = keep[j] ? x[j] : kHidden;
    }
  }
}

// Dropout's factors for columns begin..begin+n-1 of row i.
template <typename C>
void factors_of(const AttentionArgs& a, const Sequence& s, int64_t h, const Columns& columns,
                int64_t i, int64_t begin, int64_t n, C* factors, C* scratch) {
  const uint64_t row = static_cast<uint64_t>((s.b * a.heads + h) * a.row_step + i);
  const C scale = static_cast<C>(a.dropout.scale);
  if (!columns.index) {
    dropout_factors(a.dropout.seed, row, columns.first + begin, n, a.dropout.bound, scale, factors);
  } else if (n > 0) {
    const int64_t first = columns.index[begin], last = columns.index[begin + n - 1];
    dropout_factors(a.dropout.seed, row, first, last - first + 1, a.dropout.bound, scale, scratch);
    for (int64_t j = 0; j < n; ++j) factors[j] = scratch[columns.index[begin + j] - first];
  }
}

// Whether keep hides row i as a whole (a keep matrix that is broadcast along the keys).
inline bool row_hidden(const AttentionArgs& a, const Sequence& s, int64_t h, int64_t i) {
  return a.keep.data && a.keep.stride_d == 0 && a.keep.stride_t != 0 &&
         !*at_head<uint8_t>(a.keep, s, h, i);
}

// Rows begin..begin+n-1 of the columns' keys or values as (n, width) with leading dimension ld,
// dead ones as zeros.
template <typename T>
void load_columns(const AttentionView& view, const Sequence& s, int64_t kv, const Columns& columns,
                  int64_t begin, int64_t n, int64_t width, compute_t<T>* out, int64_t ld) {
  auto at = [&](int64_t c) { return at_head<T>(view, s, kv, s.k0 + columns.key(c)); };
  for (int64_t c = begin; c < begin + n; ++c, out += ld) {
    if (c + kAhead < begin + n) prefetch(at(c + kAhead), width);
    if (columns.alive && !columns.alive[c])
      std::fill_n(out, width, compute_t<T>(0));
    else
      load_row(at(c), view.stride_d, width, out);
  }
}

}  // namespace
}  // namespace CPU_CAPABILITY
}  // namespace tfm_kernels
