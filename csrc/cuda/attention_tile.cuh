// What the attention kernels share on the device: sequences, which tiles of positions meet, rows of
// heads in shared memory, what a fragment of scores hides and drops.
//
// Query i of a sequence sees key j where low <= j - i <= high, j < live and keep, if there, says
// so. Positions fit in int32, offsets in memory are int64.
#pragma once
#include "attention.h"
#include "philox.cuh"
#include "tile.cuh"

namespace tfm_kernels {

template <int number>
struct Constant {
  static constexpr int value = number;
};

// Calls `body` with a value of the call's element type and the width of its heads' tiles.
template <typename Body>
auto for_shape(const Attention& call, Body body) {
  const int widest = call.d > call.dv ? call.d : call.dv;
  return for_dtype(call.type, [&](auto zero) {
    if (widest <= 64) return body(zero, Constant<64>{});
    if (widest <= 128) return body(zero, Constant<128>{});
    return body(zero, Constant<Attention::kWidest>{});
  });
}

constexpr float kInfinity = __builtin_huge_valf();

// One sequence, its band measured from the top-left corner. What is loaded is clamped, so that no
// number on the device can lead outside of a tensor.
struct Sequence {
  int64_t q0, k0;    // first rows in q and k
  int tq, tk, live;  // live: keys below the length
  int low, high;
};

__device__ inline int64_t clamped(int64_t x, int64_t least, int64_t most) {
  return x < least ? least : x > most ? most : x;
}

__device__ inline int64_t number_at(const Indices& indices, int64_t i) {
  return indices.is_64 ? static_cast<const int64_t*>(indices.data)[i]
                       : static_cast<const int*>(indices.data)[i];
}

__device__ inline Sequence sequence_of(const Attention& call, int64_t b) {
  Sequence s{0, 0, call.queries, call.keys, call.keys, 0, 0};
  if (call.ends_q.data != nullptr) {
    s.q0 = clamped(number_at(call.ends_q, b), 0, call.total_q);
    s.k0 = clamped(number_at(call.ends_k, b), 0, call.total_k);
    const int64_t end_q = clamped(number_at(call.ends_q, b + 1), s.q0, call.total_q);
    const int64_t end_k = clamped(number_at(call.ends_k, b + 1), s.k0, call.total_k);
    s.tq = static_cast<int>(clamped(end_q - s.q0, 0, call.queries));
    s.live = s.tk = static_cast<int>(clamped(end_k - s.k0, 0, call.keys));
  }
  if (call.lengths.data != nullptr)
    s.live = static_cast<int>(clamped(number_at(call.lengths, b), 0, s.tk));
  const int64_t more = s.tk - s.tq, low = call.end_low + more, high = call.end_high + more;
  s.low = static_cast<int>(clamped(call.low > low ? call.low : low, -s.tq, s.tk));
  s.high = static_cast<int>(clamped(call.high < high ? call.high : high, -s.tq - 1, s.tk));
  return s;
}

// Positions begin..end - 1 that a tile meets, and those of them that all of the tile meets.
struct Met {
  int begin, end, full_begin, full_end;

  // Whether nothing is hidden between the tile and positions first..first + size - 1.
  __device__ bool full(int first, int size) const {
    return first >= full_begin && first + size <= full_end;
  }
  __device__ int first(int size) const { return begin / size * size; }
};

__device__ inline int least(int a, int b) { return a < b ? a : b; }
__device__ inline int most(int a, int b) { return a > b ? a : b; }

// Keys that queries m0 to m0 + size - 1 see; full: rows that do not exist see as their neighbours.
__device__ inline Met keys_met(const Sequence& s, int m0, int size) {
  const int m1 = least(m0 + size, s.tq);
  return {most(m0 + s.low, 0), least(s.live, m1 + s.high), most(m1 - 1 + s.low, 0),
          least(s.live, m0 + s.high + 1)};
}

// Queries that see keys n0 to n0 + size - 1.
__device__ inline Met queries_met(const Sequence& s, int n0, int size) {
  const int n1 = least(n0 + size, s.live);
  return {most(n0 - s.high, 0), n1 > n0 ? least(s.tq, n1 - s.low) : 0, most(n1 - 1 - s.high, 0),
          least(s.tq, n0 - s.low + 1)};
}

// Begins to bring rows first..first + rows - 1 of one head, of d elements, into a tile: zeros
// beyond d up to a multiple of 16, and outside of begin..end - 1. There after copy_wait().
template <int rows, int width, typename T>
__device__ inline void copy_rows(T* tile, const Heads& heads, const T* head, int first, int begin,
                                 int end, int d) {
  constexpr int kPacks = width / kLanes<T>, kStride = kTileStride<T, width>;
  const int padded = (d + kStep - 1) / kStep * kStep;
  for (int i = threadIdx.x; i < rows * kPacks; i += blockDim.x) {
    const int row = i / kPacks, column = i % kPacks * kLanes<T>;
    if (column >= padded) continue;
    const bool there = first + row >= begin && first + row < end && column < d;
    T* target = tile + row * kStride + column;
    const T* source = there ? head + (first + row) * heads.stride_t : head;
    if (heads.aligned) {
      const int bytes = (d - column) * static_cast<int>(sizeof(T));
      copy_16(target, source + (there ? column : 0), there ? least(bytes, 16) : 0);
    } else {
#pragma unroll
      for (int j = 0; j < kLanes<T>; ++j)
        target[j] =
            there && column + j < d ? source[(column + j) * heads.stride_d] : static_cast<T>(0.0f);
    }
  }
}

// Writes rows that a warp has in a tile, 16 of them, to first, ... < end of one head.
template <int width, typename T>
__device__ inline void store_rows(const T* tile, const Heads& heads, T* head, int first, int end,
                                  int d) {
  constexpr int kPacks = width / kLanes<T>, kStride = kTileStride<T, width>;
  for (int i = lane_of_warp(); i < 16 * kPacks; i += kWarp) {
    const int row = i / kPacks, column = i % kPacks * kLanes<T>;
    if (first + row >= end || column >= d) continue;
    const T* source = tile + row * kStride + column;
    T* target = head + (first + row) * heads.stride_t + column;
    if (heads.aligned) {
      store_16(target, *reinterpret_cast<const uint4*>(source));
    } else {
#pragma unroll
      for (int j = 0; j < kLanes<T>; ++j)
        if (column + j < d) target[j * heads.stride_d] = source[j];
    }
  }
}

// Sums of 16 rows, times a factor for each of a lane's two rows, rounded into a tile.
template <int width, int kN, typename T>
__device__ inline void put_sums(T* tile, const float (&sums)[kN][4], float first, float second) {
#pragma unroll
  for (int n = 0; n < kN; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e)
      tile[(lane_row() + e / 2 * 8) * kTileStride<T, width> + n * 8 + lane_column() + e % 2] =
          static_cast<T>(sums[n][e] * (e < 2 ? first : second));
}

// One head of something per pair; null where absent.
struct PairsOfHead {
  const char* data;
  int64_t stride_t, stride_d;
  DType type;

  __device__ PairsOfHead(const Pairs& pairs, int64_t b, int64_t h, int size)
      : data(static_cast<const char*>(pairs.data)),
        stride_t(pairs.stride_t),
        stride_d(pairs.stride_d),
        type(pairs.type) {
    if (data != nullptr) data += (b * pairs.stride_b + h * pairs.stride_h) * size;
  }
};

// What there is to know of one head beside q, k and v.
struct HeadOfCall {
  Sequence s;
  PairsOfHead bias, keep;
  uint64_t first_row;  // its row 0 in the random rule

  __device__ HeadOfCall(const Attention& call, const Sequence& sequence, int64_t b, int64_t h)
      : s(sequence),
        bias(call.bias, b, h, call.bias.type == DType::f32 ? 4 : 2),
        keep(call.keep, b, h, 1),
        first_row(static_cast<uint64_t>((b * call.heads + h) * call.row_step)) {}

  __device__ bool masked() const { return bias.data != nullptr || keep.data != nullptr; }
  __device__ bool in_band(int i, int j) const {
    return i < s.tq && j < s.live && j - i >= s.low && j - i <= s.high;
  }
};

// Whether keep shows anything between queries m0.. and keys n0.. of a tile. All threads call.
template <int rows, int columns>
__device__ inline bool shows_any(const HeadOfCall& head, int m0, int n0) {
  bool found = false;
  for (int i = threadIdx.x; i < rows * columns; i += blockDim.x) {
    const int query = m0 + i / columns, key = n0 + i % columns;
    found = found || (head.in_band(query, key) &&
                      head.keep.data[query * head.keep.stride_t + key * head.keep.stride_d] != 0);
  }
  return __syncthreads_or(found) != 0;
}

// What dropout keeps of a fragment of (queries, keys): bit e of element e. `i` is the query of the
// lane's first row, `j` the fragment's first key. Two lanes share the draws of four keys: each
// draws for one of the two rows.
__device__ inline unsigned kept_of(const Dropout& dropout, uint64_t seed, uint64_t row, int j) {
  const int odd = lane_of_warp() % 2;
  const uint4 draws =
      philox(seed, row + (odd ? 8 : 0), static_cast<uint32_t>(j + lane_column()) / 4);
  const unsigned last = dropout.last_dropped;
  const unsigned low = (draws.x > last) | (draws.y > last) << 1;
  const unsigned high = (draws.z > last) | (draws.w > last) << 1;
  const unsigned other = __shfl_xor_sync(0xffffffffu, odd ? low : high, 1);
  return odd ? other | high << 2 : low | other << 2;
}

// The same of a fragment of (keys, queries): `row` is the number of its first query, `j` its first
// key. Four lanes share the draws of four keys: each draws for one of their four pairs of rows and
// columns.
__device__ inline unsigned kept_of_turned(const Dropout& dropout, uint64_t seed, uint64_t row,
                                          int j) {
  const int mine = lane_row() % 4;  // my key among the four, and the element that I draw for
  const uint4 draws = philox(seed, row + lane_column() + mine % 2,
                             static_cast<uint32_t>(j + lane_row() + mine / 2 * 8) / 4);
  const unsigned last = dropout.last_dropped;
  const unsigned bits =
      (draws.x > last) | (draws.y > last) << 1 | (draws.z > last) << 2 | (draws.w > last) << 3;
  unsigned kept = (bits >> mine & 1) << mine;
#pragma unroll
  for (int apart = 1; apart < 4; ++apart) {
    const unsigned other = __shfl_xor_sync(0xffffffffu, bits, apart * 4);
    kept |= (other >> mine & 1) << (mine ^ apart);
  }
  return kept;
}

// All lanes' bits together.
__device__ inline uint64_t warp_or(uint64_t bits) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2)
    bits |= __shfl_xor_sync(0xffffffffu, bits, offset);
  return bits;
}

// The largest, and the sum, of the four lanes that share a row of a fragment.
__device__ inline float row_max(float value) {
  value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, 1));
  return fmaxf(value, __shfl_xor_sync(0xffffffffu, value, 2));
}
__device__ inline float row_sum(float value) {
  value += __shfl_xor_sync(0xffffffffu, value, 1);
  return value + __shfl_xor_sync(0xffffffffu, value, 2);
}

}  // namespace tfm_kernels
