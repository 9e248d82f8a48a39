// One call of attention_fwd and a worker's scratch, as host and kernel share them.
#pragma once
#include <atomic>

#include "attention_columns.h"
#include "operand.h"

namespace tfm_kernels {

struct AttentionFwd : AttentionArgs {
  AttentionView out;
  void* lse;       // (B, H, Tq) or (H, total_q), in the compute type
  int64_t rows;    // queries per tile, at most 128
  int64_t chunks;  // units per head
  int64_t tile;    // keys per tile, a multiple of kPanel, at most 16 of them
};

TFM_DECLARE_KERNEL(void attention_fwd(const AttentionFwd& args, DType dtype,
                                      std::atomic<int64_t>& next, char* scratch))

inline namespace CPU_CAPABILITY {
namespace {

// Blocks of kPanel columns that a tile meets at once.
struct Blocks {
  static constexpr int64_t kMost = 16;
  int64_t count = 0;
  int64_t first[kMost], real[kMost];  // first column, and how many columns take part
  int64_t width[kMost];               // the same or a few more: a multiple of 16

  // Whether the next block's columns follow those of block i at once.
  bool goes_on(int64_t i) const { return i + 1 < count && first[i + 1] == first[i] + kPanel; }
  // Behind the last of the blocks that follow each other from block i on.
  int64_t end_of_run(int64_t i) const {
    while (goes_on(i)) ++i;
    return i + 1;
  }
};

// Where a worker's matrices lie; `bytes` in all. Operands of products are of type O.
template <typename C, typename O>
struct AttentionFwdScratch {
  O *k_panels, *v_panels;  // the head's keys, transposed, and values
  O* q;                    // the tile's queries
  C *s, *out;              // the tile's scores and output rows
  O* p;                    // the weights as an operand, where scores are none
  C *sums, *tops;          // (rows) sum of the weights so far; largest score so far
  C* factors;              // dropout's of a row, and room to gather them
  int64_t *begins, *ends;  // (rows) the columns that a row may see
  ColumnScratch columns;
  int64_t bytes;

  AttentionFwdScratch(const AttentionFwd& a, const void* data) {
    const int64_t keys = round_up(a.keys, kPanel), dv = round_up(a.dv, 16);
    Scratch scratch(data);
    k_panels = scratch.take<O>(keys * a.d);
    v_panels = scratch.take<O>(keys * dv);
    q = scratch.take<O>(std::max<int64_t>(a.rows, 64) * a.d);
    s = scratch.take<C>(a.rows * a.tile);
    out = scratch.take<C>(a.rows * dv);
    p = scratch.take<O>(std::is_same_v<O, C> ? 0 : a.rows * a.tile);
    sums = scratch.take<C>(a.rows);
    tops = scratch.take<C>(a.rows);
    factors = scratch.take<C>(a.dropout.active() ? a.tile + keys : 0);
    begins = scratch.take<int64_t>(a.rows);
    ends = scratch.take<int64_t>(a.rows);
    columns = ColumnScratch(scratch, a.keys);
    bytes = scratch.bytes();
  }
};

}  // namespace
}  // namespace CPU_CAPABILITY
}  // namespace tfm_kernels
