// A thread's share of a row: packs of 16 bytes, 4 elements of float32 or 8 of a 16-bit type, that
// lie one group of threads apart. Loads and stores of 16 bytes where the call is aligned, element
// by element where it is not; any N.
#pragma once
#include "device.cuh"

namespace tfm_kernels {

template <typename T>
constexpr int kLanes = 16 / static_cast<int>(sizeof(T));  // elements of a pack

// 16, 8 or 4 bytes moved by one instruction.
template <int kBytes>
struct Word;
template <>
struct Word<16> {
  using type = uint4;
};
template <>
struct Word<8> {
  using type = uint2;
};

// Which columns a thread of a group owns: packs pack 0, 1, ... of kLanes, from `first`.
struct Place {
  int first;     // column of the thread's pack 0
  int distance;  // columns from one of its packs to the next
  int n;         // columns of the row
  bool aligned;  // all rows of all tensors start at a whole pack, and n is a multiple of it
};

__device__ inline float2 widen2(float2 pair) { return pair; }
__device__ inline float2 widen2(__half2 pair) { return __half22float2(pair); }
__device__ inline float2 widen2(__nv_bfloat162 pair) { return __bfloat1622float2(pair); }

template <typename T>
struct Pair;
template <>
struct Pair<float> {
  using type = float2;
  static __device__ float2 of(float a, float b) { return float2{a, b}; }
};
template <>
struct Pair<__half> {
  using type = __half2;
  static __device__ __half2 of(float a, float b) { return __floats2half2_rn(a, b); }
};
template <>
struct Pair<__nv_bfloat16> {
  using type = __nv_bfloat162;
  static __device__ __nv_bfloat162 of(float a, float b) { return __floats2bfloat162_rn(a, b); }
};

// `lanes` elements of S from `source`, aligned to min(16, their bytes).
template <typename S, int lanes>
__device__ inline void load_aligned(const S* source, float (&values)[lanes]) {
  constexpr int kBytes = lanes * sizeof(S) < 16 ? lanes * static_cast<int>(sizeof(S)) : 16;
  constexpr int kEach = kBytes / static_cast<int>(sizeof(S));
  using W = typename Word<kBytes>::type;
  union Both {
    W word;
    typename Pair<S>::type pairs[kEach / 2];
    __device__ Both() : word{} {}
  };
#pragma unroll
  for (int w = 0; w < lanes / kEach; ++w) {
    Both both;
    both.word = reinterpret_cast<const W*>(source)[w];
#pragma unroll
    for (int i = 0; i < kEach / 2; ++i) {
      const float2 two = widen2(both.pairs[i]);
      values[w * kEach + 2 * i] = two.x;
      values[w * kEach + 2 * i + 1] = two.y;
    }
  }
}

// Calls op(pack, lane, value) for every element of the thread's columns that the row has.
template <typename S, int packs, int lanes, typename Op>
__device__ inline void visit_as(const S* row, const Place& place, const Op& op) {
  if (place.aligned) {
#pragma unroll
    for (int k = 0; k < packs; ++k) {
      const int column = place.first + k * place.distance;
      if (column >= place.n) continue;
      float values[lanes];
      load_aligned<S, lanes>(row + column, values);
#pragma unroll
      for (int i = 0; i < lanes; ++i) op(k, i, values[i]);
    }
  } else {
#pragma unroll
    for (int k = 0; k < packs; ++k) {
      const int column = place.first + k * place.distance;
#pragma unroll
      for (int i = 0; i < lanes; ++i)
        if (column + i < place.n) op(k, i, static_cast<float>(row[column + i]));
    }
  }
}

// The same for row m of `rows`, whose type may differ from T, the type that the packs are cut for:
// every type beside float32, float32 beside the 16-bit types.
template <typename T, int packs, typename Op>
__device__ inline void visit(const Rows& rows, int64_t m, const Place& place, const Op& op) {
  constexpr int kEach = kLanes<T>;
  const int64_t offset = m * rows.stride;
  if (rows.type == kDType<T>) {
    visit_as<T, packs, kEach>(static_cast<const T*>(rows.data) + offset, place, op);
  } else if constexpr (sizeof(T) == 2) {
    visit_as<float, packs, kEach>(static_cast<const float*>(rows.data) + offset, place, op);
  } else if (rows.type == DType::f16) {
    visit_as<__half, packs, kEach>(static_cast<const __half*>(rows.data) + offset, place, op);
  } else {
    visit_as<__nv_bfloat16, packs, kEach>(static_cast<const __nv_bfloat16*>(rows.data) + offset,
                                          place, op);
  }
}

// Writes the thread's columns of one row, each element rounded once.
template <typename T, int packs>
__device__ inline void store(T* row, const Place& place, const float (&values)[packs][kLanes<T>]) {
  constexpr int kEach = kLanes<T>;
  union Both {
    uint4 word;
    typename Pair<T>::type pairs[kEach / 2];
    __device__ Both() : word{} {}
  };
#pragma unroll
  for (int k = 0; k < packs; ++k) {
    const int column = place.first + k * place.distance;
    if (place.aligned) {
      if (column >= place.n) continue;
      Both both;
#pragma unroll
      for (int i = 0; i < kEach / 2; ++i)
        both.pairs[i] = Pair<T>::of(values[k][2 * i], values[k][2 * i + 1]);
      store_16(row + column, both.word);
    } else {
#pragma unroll
      for (int i = 0; i < kEach; ++i)
        if (column + i < place.n) row[column + i] = static_cast<T>(values[k][i]);
    }
  }
}

template <int packs, int lanes, typename Value>
__device__ inline void fill(float (&values)[packs][lanes], const Value& value) {
#pragma unroll
  for (int k = 0; k < packs; ++k)
#pragma unroll
    for (int i = 0; i < lanes; ++i) values[k][i] = value(k, i);
}

// The sum of a thread's values in four strands, which rounds less than one and waits less.
template <int packs, int lanes, typename Term>
__device__ inline float sum_terms(const Term& term) {
  float strands[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
  for (int k = 0; k < packs; ++k)
#pragma unroll
    for (int i = 0; i < lanes; ++i) strands[i % 4] += term(k, i);
  return (strands[0] + strands[1]) + (strands[2] + strands[3]);
}

}  // namespace tfm_kernels
