// Products of matrices and sums over rows, as ffn's launchers ask gemm.cu for them; plain C++.
#pragma once
#include "launch.h"

namespace tfm_kernels {

// What is multiplied: x (M, K) with w (N, K) or (K, N), or x (K, M) with w (K, N).
enum class Form { x_wt, x_w, xt_w };

// C (M, N) = x w [+ x2 w2] [+ bias]; every matrix of `type`, with unit stride along its last axis.
struct Gemm {
  Form form;
  DType type;
  Rows x, w, x2, w2;       // x2 and w2, of the same shapes, may be absent
  Rows bias;               // (N,), may be absent
  void* c;                 // contiguous
  int64_t m, n, k;         // n < 2^31
  int splits = 1;          // parts of k, for which bias and a second product must be absent
  float* parts = nullptr;  // (splits, M, N) where splits > 1
};

int gemm_splits(int64_t m, int64_t n, int64_t k);     // on the current device
const char* launch(const Gemm& args, Stream stream);  // null, or what went wrong

// sum (N,) of `type` = x (M, N) over its rows, in an order that only M and N decide.
struct SumRows {
  Rows x;
  void* sum;
  DType type;
  int64_t m, n;
  float* parts = nullptr;  // (runs, N) where sum_rows_runs() > 1
  int runs = 1;            // of rows that are summed apart: launch() sets it
};

int sum_rows_runs(int64_t m, int64_t n);
const char* launch(const SumRows& args, Stream stream);

namespace gemm {

struct Sides {
  int rows, columns;
};

struct Config {
  bool large;       // tiles of the larger sides
  int64_t tiles;    // of all parts
  int blocks_each;  // of a multiprocessor
};

#ifdef __CUDACC__
#define TFM_ANYWHERE __host__ __device__
#else
#define TFM_ANYWHERE
#endif
TFM_ANYWHERE constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
TFM_ANYWHERE constexpr int tiles_of(int64_t n, int side) {
  return static_cast<int>(ceil_div(n, side));
}
#undef TFM_ANYWHERE

// The launch for C (M, N) in `splits` parts: large tiles read least, but every multiprocessor has
// to get one.
constexpr Config pick(int64_t m, int64_t n, DType type, int multiprocessors,
                      Sides large = {128, 128}, Sides small = {64, 64}, int splits = 1) {
  const auto tiles = [&](Sides sides) {
    return ceil_div(m, sides.rows) * ceil_div(n, sides.columns) * splits;
  };
  const bool fills = tiles(large) >= multiprocessors && n > small.columns &&
                     (m > small.rows || large.rows == small.rows);
  const int small_blocks = type == DType::f32 ? 2 : 4;
  return {fills, tiles(fills ? large : small), fills ? small_blocks / 2 : small_blocks};
}

}  // namespace gemm
}  // namespace tfm_kernels
