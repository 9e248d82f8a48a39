// One call of ffn_fwd and its working memory, as host and kernels share them.
#pragma once
#include <algorithm>
#include <cstdint>

#include "activation.h"
#include "few_rows.h"
#include "isa.h"
#include "philox.h"
#include "vec.h"
#include "weights.h"

namespace tfm_kernels {

struct FfnTiling {
  int64_t rows;      // per tile, a multiple of 16, at most kMaxTileRows
  int64_t tiles;     // ceil(M / rows)
  int64_t panel;     // rows that lie side by side in a right operand, a multiple of 16
  int64_t chunk;     // hidden features at a time, a multiple of 16
  int64_t segments;  // parts of the hidden features that are summed apart: more than 1 only where
                     // tiles < threads
};

struct FfnFwd {
  const void *x, *w1, *b1, *w2, *b2, *gate;  // b1, b2, gate may be null; weights contiguous
  const void* gate_bias;                     // may be null
  void *y, *preact;                          // preact null where it is not wanted
  int64_t x_stride_m, M, E, F, Eo;
  bool gated;       // an empty gate has a null pointer
  bool bf16_tiles;  // bfloat16 is multiplied as it is stored
  Activation activation;
  Dropout dropout;
  const int64_t* dropout_rows;  // (M) or null
  FfnTiling tiling;
  // Where rows are few: the hidden activation in the compute type, as few_rows.h takes it.
  void* hidden;
};

// Elements of working memory that one task needs.
inline int64_t ffn_fwd_scratch(const FfnFwd& args) {
  const auto& tiling = args.tiling;
  // the hidden activation as an operand of bfloat16, or weights as they are widened
  const int64_t wide = args.bf16_tiles ? tiling.chunk * tiling.panel / 2
                                       : widened_room(std::max(args.E, tiling.chunk));
  return args.E * tiling.rows + (args.gated ? 2 : 1) * tiling.chunk * tiling.panel + wide;
}

// Task (tile, segment) leaves its share of y^T in `partial`, panels of (Eo, panel) one behind the
// other, the last of which may be narrower; the join of a tile adds the segments' shares of columns
// begin..end - 1 in order and stores y.
TFM_DECLARE_KERNEL(void ffn_fwd(const FfnFwd& args, DType dtype, int64_t tile, int64_t segment,
                                void* partial, void* scratch))
TFM_DECLARE_KERNEL(void ffn_fwd_join(const FfnFwd& args, DType dtype, int64_t tile, int64_t begin,
                                     int64_t end, void* partials))

// Few rows: features begin..end - 1 of the hidden activation, then features begin..end - 1 of y.
TFM_DECLARE_KERNEL(void ffn_fwd_few_rows_hidden(const FfnFwd& args, DType dtype, int64_t begin,
                                                int64_t end, void* scratch))
TFM_DECLARE_KERNEL(void ffn_fwd_few_rows_out(const FfnFwd& args, DType dtype, int64_t begin,
                                             int64_t end, void* scratch))

// Elements of working memory that each of them needs.
inline int64_t ffn_fwd_few_rows_scratch(const FfnFwd& args) {
  return (args.gated ? 2 : 1) * few_rows_room(args.M) +
         few_rows_operand_room(args.M, std::max(args.E, args.F));
}

}  // namespace tfm_kernels
