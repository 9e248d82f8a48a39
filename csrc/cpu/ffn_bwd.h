// One call of ffn_bwd and its working memory, as host and kernels share them.
//
// Rows are taken in blocks of a few hundred, with working memory that is used again for every
// block. In a block, one task of `prepare` = 64 rows of x and dy, widened and laid out for the
// products; one task of `hidden` = 64 or 128 hidden features, for which it computes h, dp and dg in
// L2 and adds to dw1, db1, dw2 and dgate; one task of `input` = rows and columns of dx. db2 is the
// sum of dy over its rows, columns by columns. Every element has one owner that adds in one order:
// the result does not depend on the number of threads.
#pragma once
#include <algorithm>
#include <cstdint>

#include "activation.h"
#include "gradient.h"
#include "isa.h"
#include "philox.h"
#include "vec.h"

namespace tfm_kernels {

struct FfnBwd {
  const void *dy, *x, *w1, *b1, *w2, *gate;  // b1 may be null; weights contiguous
  const void* gate_bias;                     // may be null; db1 then holds its gradient behind b1's
  const void* preact;                        // null: computed again
  void *dx, *dw1, *db1, *dw2, *db2, *dgate;  // null where not wanted
  int64_t dy_stride_m, x_stride_m, M, E, F, Eo;
  bool gated;
  bool bf16_tiles;  // bfloat16 is multiplied as it is stored
  Activation activation;
  Dropout dropout;
  const int64_t* dropout_rows;  // (M) or null
  int64_t block, strip,
      chunk;  // rows a block, rows at a time in `hidden`, features a task of `hidden`
  // Working memory, in the type of operands but for the sums, which are of the compute type. The
  // *_rows are the tensors themselves where operands are of the storage type; the *_sum, where sums
  // are.
  void* x_panels;                // panels of columns, each (block, width)
  void* dy_t;                    // (Eo, dy_t_ld)
  const void *x_rows, *dy_rows;  // (block, E), (block, Eo) of the present block
  Slices dp, dg;                 // of the present block
  void* dx_sum;                  // (block, E) of the present block
  bool own_sums;  // of the weights' gradients, of one block: tasks form them in their own memory
  void *dw1_sum, *dw2_sum, *dgate_sum;
  double* db1_sum;  // as db1
  int64_t x_rows_ld, dy_rows_ld, dy_t_ld;

  bool needs_dh() const { return dx || dw1 || dgate || db1; }
  int64_t biases() const { return gate_bias ? 2 * F : F; }
};

// Elements of working memory that one task of `hidden` or `input` needs.
inline int64_t ffn_bwd_scratch(const FfnBwd& args) {
  const int64_t gates = args.gated ? 2 : 1, weights = args.preact ? 0 : gates;
  const int64_t hidden = args.chunk * (args.Eo + weights * args.E) +
                         (2 + gates) * args.chunk * args.strip +
                         gates * args.chunk * (args.strip + 16);
  const int64_t sums = args.block <= args.strip
                           ? kGradientRowStep * kPanel
                           : args.chunk * (gates * round_up(args.E, kPanel) + args.Eo);
  return std::max(hidden + (args.own_sums ? sums : 0),
                  std::min(args.F, kGradientSumStep) * round_up(args.E, kPanel));
}

// `row` is the first of the present block, which has `rows`; begin and end count within it.
TFM_DECLARE_KERNEL(void ffn_bwd_prepare(const FfnBwd& args, DType dtype, int64_t row, int64_t begin,
                                        int64_t end))
TFM_DECLARE_KERNEL(void ffn_bwd_hidden(const FfnBwd& args, DType dtype, int64_t row, int64_t rows,
                                       int64_t feature, void* scratch))
// Columns first..last - 1 of dx; `first` is a multiple of kPanel.
TFM_DECLARE_KERNEL(void ffn_bwd_input(const FfnBwd& args, DType dtype, int64_t row, int64_t begin,
                                      int64_t end, int64_t first, int64_t last, void* scratch))

constexpr int64_t kFfnBiasColumns = 128;  // columns of db2 at a time, at most
TFM_DECLARE_KERNEL(void ffn_bwd_db2(const FfnBwd& args, DType dtype, int64_t first, int64_t last))

// Rows that have kernels of their own, at most. They took 0.6 to 1.1 of the tiles' time at as many
// (128-512 to 1024-4096, Zen 4, its AVX2 too), at twice as many up to 1.4.
constexpr int64_t kFfnBwdFewRows = 32;
inline int64_t ffn_bwd_few_rows(bool bf16_tiles) {
  if (bf16_tiles) return 4;
  return isa() == Isa::avx512 ? kFfnBwdFewRows : 8;
}

// Few rows, of which there is one block, preact is there and the operands are of the compute type:
// hidden features begin..end - 1, then columns first..last - 1 of dx.
TFM_DECLARE_KERNEL(void ffn_bwd_few_rows_hidden(const FfnBwd& args, DType dtype, int64_t begin,
                                                int64_t end, void* scratch))
TFM_DECLARE_KERNEL(void ffn_bwd_few_rows_input(const FfnBwd& args, DType dtype, int64_t first,
                                               int64_t last, void* scratch))

// Elements of working memory that a task of so many features or columns needs.
inline int64_t ffn_bwd_few_rows_scratch(const FfnBwd& args, int64_t features, int64_t columns) {
  return args.M * std::max((args.gated ? 3 : 2) * gradient_ld(features), gradient_ld(columns));
}

}  // namespace tfm_kernels
