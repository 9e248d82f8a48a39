// A warp's scores: products of rows of heads, what a mask hides of them, and online softmax.
#pragma once
#include "attention_tile.cuh"

namespace tfm_kernels {

// The first row of a head of a sequence.
template <typename T>
__device__ inline const T* rows_of(const Heads& heads, int64_t b, int64_t h, int64_t row) {
  return static_cast<const T*>(heads.data) + b * heads.stride_b + h * heads.stride_h +
         row * heads.stride_t;
}

// The tiles of keys that some query of a tile sees, in order.
template <int rows, int keys>
struct KeyTiles {
  const HeadOfCall& head;
  int m0;
  Met met;

  // The first tile from n0 on that shows something, or where they end. All threads call.
  __device__ int next(int n0) const {
    if (head.keep.data != nullptr)
      while (n0 < met.end && !shows_any<rows, keys>(head, m0, n0)) n0 += keys;
    return n0;
  }
  __device__ bool full(int n0) const { return head.keep.data == nullptr && met.full(n0, keys); }
};

// dots += a b^T of rows of d elements: 16 kM of the warp's own against 8 kN.
template <int width, typename T, int kM, int kN>
__device__ inline void add_dots(float (&dots)[kM][kN][4], const T* a, const T* b, int d) {
  constexpr int kStride = kTileStride<T, width>;
#pragma unroll 1
  for (int k = 0; k < d; k += kStep) {
    Left<T> left[kM];
#pragma unroll
    for (int m = 0; m < kM; ++m) load_left<Lie::along_k>(left[m], a, kStride, m * 16, k);
    if constexpr (sizeof(T) == 2) {
      multiply_add<Lie::along_k>(dots, left, b, kStride, 0, k);
    } else {  // as add_piece() does, which takes more registers for so few sums
      float piece[kM][kN][4] = {};
      multiply_add<Lie::along_k>(piece, left, b, kStride, 0, k);
      add_sums(dots, piece);
    }
  }
}

// sums += weights of 16 kM rows times a turned tile of 8 kN rows, of which those with a bit count.
// Where all do, and d fills the tile, nothing stands between the products.
template <int width, typename T, int kM, int kN, int kOut>
__device__ inline void add_weighted(float (&sums)[kM][kOut][4], const float (&weights)[kM][kN][4],
                                    const T* tile, int d, uint64_t chosen) {
  constexpr uint64_t kEvery = ~uint64_t{0} >> (64 - 8 * kN);
  constexpr int kStride = kTileStride<T, width>;
  const auto each_step = [&](const auto& multiply) {
#pragma unroll
    for (int step = 0; step < kN / 2; ++step) {
      Left<T> left[kM];
#pragma unroll
      for (int m = 0; m < kM; ++m)
        make_left(left[m], weights[m][2 * step], weights[m][2 * step + 1]);
      multiply(left, step * kStep);
    }
  };
  if ((chosen & kEvery) == kEvery && d > width - 16)
    each_step([&](const Left<T>(&left)[kM], int k) {
      add_piece<Lie::turned>(sums, left, tile, kStride, 0, k);
    });
  else
    each_step([&](const Left<T>(&left)[kM], int k) {
      add_piece<Lie::turned>(sums, left, tile, kStride, 0, k, d, ChosenRows{chosen});
    });
}

// Calls op(sum, place) for a warp's sums that are not -inf: place is where the pair lies in
// `pairs`.
template <bool turned, int kM, int kN, typename Op>
__device__ inline void visit_pairs(const PairsOfHead& pairs, int m0, int n0, float (&x)[kM][kN][4],
                                   const Op& op) {
  const int64_t down = turned ? pairs.stride_d : pairs.stride_t;
  const int64_t across = turned ? pairs.stride_t : pairs.stride_d;
  const int64_t first =
      m0 * pairs.stride_t + n0 * pairs.stride_d + lane_row() * down + lane_column() * across;
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t row = first + (m * 16 + half * 8) * down;
#pragma unroll
      for (int i = 0; i < 2 * kN; ++i) {
        float& sum = x[m][i / 2][half * 2 + i % 2];
        if (sum != -kInfinity) op(sum, row + (i / 2 * 8 + i % 2) * across);
      }
    }
}

template <typename B, bool turned, int kM, int kN>
__device__ inline void add_bias(const HeadOfCall& head, float scale, int m0, int n0,
                                float (&x)[kM][kN][4]) {
  const B* bias = reinterpret_cast<const B*>(head.bias.data);
  visit_pairs<turned>(head.bias, m0, n0, x, [&](float& sum, int64_t place) {
    const float more = static_cast<float>(bias[place]);
    sum = more == -kInfinity ? more : fmaf(sum, scale, more);
  });
}

// A.1 from q k^T of queries m0.. and keys n0.., or turned, from k q^T: -inf where a pair is hidden,
// chosen, so that NaN in hidden keys ends here.
template <typename T, bool turned, int kM, int kN>
__device__ inline void score(const Attention& call, const HeadOfCall& head, int m0, int n0,
                             float (&x)[kM][kN][4]) {
  const Sequence& s = head.s;
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = (turned ? n0 : m0) + m * 16 + half * 8 + lane_row();
      int begin = 0, end = 0;  // columns that it sees
      if (!turned && row < s.tq) {
        begin = row + s.low - n0;
        end = least(row + s.high + 1, s.live) - n0;
      }
      if (turned && row < s.live) {
        begin = row - s.high - m0;
        end = least(row - s.low + 1, s.tq) - m0;
      }
#pragma unroll
      for (int i = 0; i < 2 * kN; ++i) {
        const int column = i / 2 * 8 + lane_column() + i % 2;
        if (column < begin || column >= end) x[m][i / 2][half * 2 + i % 2] = -kInfinity;
      }
    }
  if (head.keep.data != nullptr)
    visit_pairs<turned>(head.keep, m0, n0, x, [&](float& sum, int64_t place) {
      if (head.keep.data[place] == 0) sum = -kInfinity;
    });
  if (!call.scored) return;
  if (head.bias.data == nullptr) {
#pragma unroll
    for (int i = 0; i < 4 * kM * kN; ++i) {
      float& sum = x[i / 4 / kN][i / 4 % kN][i % 4];
      if (sum != -kInfinity) sum *= call.scale;
    }
  } else if (head.bias.type == kDType<T>) {
    add_bias<T, turned>(head, call.scale, m0, n0, x);
  } else if constexpr (sizeof(T) == 2) {
    add_bias<float, turned>(head, call.scale, m0, n0, x);
  }
}

// The columns of which some row of the warp's is not -inf; all of them where no bias or keep hides.
template <int kM, int kN>
__device__ inline uint64_t seen_columns(const HeadOfCall& head, const float (&x)[kM][kN][4]) {
  if (!head.masked()) return ~uint64_t{0};
  uint64_t seen = 0;
#pragma unroll
  for (int i = 0; i < 4 * kM * kN; ++i)
    if (x[i / 4 / kN][i / 4 % kN][i % 4] != -kInfinity)
      seen |= uint64_t{1} << (i / 4 % kN * 8 + i % 2 + lane_column());
  return warp_or(seen);
}

// Weights that dropout drops become 0.
template <int kM, int kN>
__device__ inline void drop(const Dropout& dropout, const HeadOfCall& head, int m0, int n0,
                            float (&p)[kM][kN][4]) {
  const uint64_t seed = static_cast<uint64_t>(*dropout.seed);
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      const uint64_t row = head.first_row + static_cast<uint64_t>(m0 + m * 16 + lane_row());
      const unsigned kept = kept_of(dropout, seed, row, n0 + n * 8);
#pragma unroll
      for (int e = 0; e < 4; ++e)
        if (!(kept >> e & 1)) p[m][n][e] = 0.0f;
    }
}

// 2^x of a weight, which is 1 at most; 0 below 2^-126, for whose sake exp2f takes more
// instructions.
__device__ inline float power_of_two(float x) {
#ifdef TFM_SIMT
  return exp2f(x);
#else
  float found;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(found) : "f"(x));
  return found;
#endif
}

// What online softmax knows of a lane's rows: g and g + 8 of each fragment.
template <int kM>
struct Softmax {
  float tops[kM][2], sums[kM][2];  // sums: of the lane's own columns, until finish()

  __device__ Softmax() {
#pragma unroll
    for (int i = 0; i < 2 * kM; ++i) tops[i / 2][i % 2] = -kInfinity, sums[i / 2][i % 2] = 0.0f;
  }

  // From scores to weights, relative to the largest score so far. What was summed before has to be
  // multiplied by `decays`.
  template <int kN>
  __device__ void weigh(float (&x)[kM][kN][4], float step, float (&decays)[kM][2]) {
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float top = -kInfinity;
#pragma unroll
        for (int i = 0; i < 2 * kN; ++i) top = fmaxf(top, x[m][i / 2][half * 2 + i % 2]);
        top = fmaxf(tops[m][half], row_max(top));
        const float shift = top == -kInfinity ? 0.0f : top;
        // the difference comes first, so that large scores lose nothing
        const float decay = power_of_two((tops[m][half] - shift) * step);
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < 2 * kN; ++i) {
          float& p = x[m][i / 2][half * 2 + i % 2];
          p = power_of_two((p - shift) * step);
          sum += p;
        }
        sums[m][half] = fmaf(sums[m][half], decay, sum);
        tops[m][half] = top;
        decays[m][half] = decay;
      }
  }

  // Adds up what the lanes of a row have.
  __device__ void finish() {
#pragma unroll
    for (int i = 0; i < 2 * kM; ++i) sums[i / 2][i % 2] = row_sum(sums[i / 2][i % 2]);
  }
};

}  // namespace tfm_kernels
