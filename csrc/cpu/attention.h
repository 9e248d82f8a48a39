// What the attention kernels share: the call as raw pointers, the rows of a head, and a worker's
// scratch.
//
// Plain C++, no torch header beyond at::vec.
#pragma once
#include <algorithm>
#include <limits>
#include <utility>

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
  int64_t row_step = 0;     // dropout rows per head
  bool bf16_tiles = false;  // bfloat16 is multiplied as it is stored
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

// A worker's scratch, handed out piece by piece. An address of 0 only measures.
class Scratch {
 public:
  explicit Scratch(const void* data) : begin(reinterpret_cast<uintptr_t>(data)), at(begin) {}

  // n elements that begin on a cache line if the scratch does.
  template <typename E>
  E* take(int64_t n) {
    const int64_t bytes = round_up(n * static_cast<int64_t>(sizeof(E)), 64);
    return reinterpret_cast<E*>(std::exchange(at, at + static_cast<uintptr_t>(bytes)));
  }
  int64_t bytes() const { return static_cast<int64_t>(at - begin); }

 private:
  uintptr_t begin, at;
};

inline namespace CPU_CAPABILITY {
namespace {

// The first element of head h of sequence s.
template <typename T>
const T* at_head(const AttentionView& view, const Sequence& s, int64_t h, int64_t row) {
  return static_cast<const T*>(view.data) + s.b * view.stride_b + h * view.stride_h +
         row * view.stride_t;
}

// out[i] = in[i * stride], widened unless out has the type of in.
template <typename T, typename C>
void load_row(const T* in, int64_t stride, int64_t n, C* out) {
  if constexpr (std::is_same_v<C, T>) {
    if (stride == 1) return void(std::copy_n(in, n, out));
  } else if constexpr (std::is_same_v<C, compute_t<T>>) {
    if (stride == 1) return widen(in, n, out);
  }
  for (int64_t i = 0; i < n; ++i) out[i] = static_cast<C>(in[i * stride]);
}

// in[i] to out[i * stride], rounded once.
template <typename T>
void store_row(const compute_t<T>* in, int64_t n, T* out, int64_t stride) {
  if (stride == 1)
    narrow(in, n, out);
  else
    for (int64_t i = 0; i < n; ++i) out[i * stride] = static_cast<T>(in[i]);
}

// Where row i of head h lies in lse.
inline int64_t lse_at(const AttentionArgs& a, const Sequence& s, int64_t h, int64_t i) {
  return s.b * a.lse_stride_b + h * a.lse_stride_h + s.q0 + i;
}

// Whether keep hides row i as a whole (a keep matrix that is broadcast along the keys).
inline bool row_hidden(const AttentionArgs& a, const Sequence& s, int64_t h, int64_t i) {
  return a.keep.data && a.keep.stride_d == 0 && a.keep.stride_t != 0 &&
         !*at_head<uint8_t>(a.keep, s, h, i);
}

}  // namespace
}  // namespace CPU_CAPABILITY
}  // namespace tfm_kernels
