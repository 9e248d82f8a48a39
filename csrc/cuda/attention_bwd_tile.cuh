// What the backward kernels of attention share on the device: what is known of a row, and A.3, A.6
// and A.7 of a warp's fragments.
#pragma once
#include "attention_bwd.h"
#include "attention_softmax.cuh"

namespace tfm_kernels {

// A block's tile of (queries, keys), 16 queries a warp, as dq and dbias are made by.
template <int item_size, int width>
struct PairsShape {
  static constexpr bool kFew = width == 256 && item_size == 4;    // shared memory holds no more
  static constexpr int kWarps = kFew ? 2 : 4, kN = kFew ? 2 : 4;  // fragments of 8 keys
  static constexpr int kStages = width == 64 && item_size == 2 ? 2 : 1;  // of tiles that pass
  static constexpr int kRows = kWarps * 16, kKeys = kN * 8;
};

// Weights are p = 2^((x - top) step - shift): top is lse in units of the scores and shift 0. Where
// |lse| is so large that float32 has lost log(sum) beside the maximum, top is the maximum and shift
// log2(sum). delta is dout . out - dlse, the term of A.7 that is the same for all keys. A row that
// sees nothing has top = inf, one with NaN top = NaN.
struct alignas(16) RowNumbers {
  float top, shift, delta, unused;

  __device__ bool sees() const { return top != kInfinity; }
  // NaN in a query reaches the keys that it sees through dx alone
  __device__ bool counts() const { return sees() && top == top; }
};

__device__ inline RowNumbers load_numbers(const RowNumbers* rows, int i, int end) {
  RowNumbers found{kInfinity, 0.0f, 0.0f, 0.0f};
  if (i < end) {
    const float4 word = *reinterpret_cast<const float4*>(rows + i);
    found = {word.x, word.y, word.z, 0.0f};
  }
  return found;
}

// From scores x and products dout v^T of one fragment to f p, in x, and dx, in products; 0, not a
// product with 0, where a pair is hidden. of(e) is the row of element e, bit e of kept what dropout
// keeps of it.
template <typename Of>
__device__ inline void differentiate(float (&x)[4], float (&products)[4], const Of& of, float step,
                                     unsigned kept, float keep_scale) {
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const RowNumbers row = of(e);
    const bool hidden = x[e] == -kInfinity;
    const float power = fmaf(x[e] - row.top, step, -row.shift);
    const float p = hidden ? 0.0f : power_of_two(power > 0.0f ? 0.0f : power);
    const float factor = kept >> e & 1 ? keep_scale : 0.0f;
    // a dropped product counts as 0, whatever it is
    const float dp = factor == 0.0f ? 0.0f : products[e] * factor;
    x[e] = p * factor;
    products[e] = hidden ? 0.0f : p * (dp - row.delta);
  }
}

// The same of all of a warp's fragments, (queries, keys), or turned, (keys, queries).
template <bool turned, int kM, int kN>
__device__ inline void differentiate_all(const Attention& call, const HeadOfCall& head,
                                         const RowNumbers* rows, int m0, int n0,
                                         float (&x)[kM][kN][4], float (&products)[kM][kN][4]) {
  const Dropout& dropout = call.dropout;
  const uint64_t seed = dropout.seed == nullptr ? 0 : static_cast<uint64_t>(*dropout.seed);
#pragma unroll
  for (int first = 0; first < (turned ? kN : kM); ++first) {
    // the two rows of a lane's fragments; turned, its two columns
    const int i = m0 + (turned ? first * 8 + lane_column() : first * 16 + lane_row());
    const RowNumbers numbers[2] = {load_numbers(rows, i, head.s.tq),
                                   load_numbers(rows, i + (turned ? 1 : 8), head.s.tq)};
    const uint64_t row = head.first_row + static_cast<uint64_t>(i);
#pragma unroll
    for (int second = 0; second < (turned ? kM : kN); ++second) {
      const int m = turned ? second : first, n = turned ? first : second;
      unsigned kept = 15;
      if (dropout.seed != nullptr)
        kept = turned ? kept_of_turned(dropout, seed, row - lane_column(), n0 + m * 16)
                      : kept_of(dropout, seed, row, n0 + n * 8);
      differentiate(
          x[m][n], products[m][n], [&](int e) { return numbers[turned ? e % 2 : e / 2]; },
          call.step, kept, dropout.scale);
    }
  }
}

// Bits of queries m0 to m0 + 31 whose numbers say so.
template <typename Says>
__device__ inline uint64_t chosen_rows(const RowNumbers* rows, int m0, int end, const Says& says) {
  return __ballot_sync(0xffffffffu, says(load_numbers(rows, m0 + lane_of_warp(), end)));
}

}  // namespace tfm_kernels
