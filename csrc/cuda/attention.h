// What the attention kernels and their bindings share: a call as raw pointers. Plain C++.
#pragma once
#include "launch.h"

namespace tfm_kernels {

// A (B, H, T, D) tensor, or (total, H, D) with stride_b 0. Strides count elements.
struct Heads {
  const void* data = nullptr;
  int64_t stride_b = 0, stride_h = 0, stride_t = 0, stride_d = 0;
  bool aligned = false;  // every row lies in one piece and starts at a multiple of 16 bytes
};

// Something per pair, (B, H, Tq, Tk), with stride 0 where it is broadcast; null where absent.
struct Pairs {
  const void* data = nullptr;
  int64_t stride_b = 0, stride_h = 0, stride_t = 0, stride_d = 0;
  DType type = DType::f32;
};

// int32 or int64 numbers on the device; null where absent.
struct Indices {
  const void* data = nullptr;
  bool is_64 = false;
};

// A call. Scores are x = q k^T, or x = scale q k^T + bias where `scored`: with a bias, or a scale
// that is not positive. Then p = 2^((x - top) step) and lse = top unit + log(sum).
struct Attention {
  static constexpr int kWidest = 256;             // head dimensions
  static constexpr int64_t kLongest = 1LL << 30;  // positions of one sequence
  static constexpr int64_t kFar = 1LL << 40;      // a limit that no pair of positions reaches

  Heads q, k, v;                         // one storage type
  Pairs bias, keep;                      // bias of that type or float32; keep holds bytes
  Indices lengths, ends_q, ends_k;       // (B,); (B + 1,) of packed calls
  int batch, heads, group;               // group: query heads that share a key head
  int queries, keys, d, dv;              // packed: of the longest sequences
  int64_t total_q, total_k;              // packed: rows of q and of k
  int64_t low, high, end_low, end_high;  // the bands of the two corners
  int64_t lse_stride_b, lse_stride_h;
  int64_t row_step;  // dropout's rows from one head to the next
  float scale, step, unit;
  bool scored;
  DType type;
  Dropout dropout;
};

}  // namespace tfm_kernels
