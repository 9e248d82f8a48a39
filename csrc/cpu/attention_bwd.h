// One call of attention_bwd and a worker's scratch, as host and kernel share them.
#pragma once
#include <atomic>

#include "attention_columns.h"

namespace tfm_kernels {

struct AttentionBwd : AttentionArgs {
  AttentionView out, dout, dq, dk, dv_out;
  const void *lse, *dlse;  // in the compute type; dlse may be null
  void* dq_parts;          // (splits, rows of lse, D) in the compute type, or null: write dq
  int64_t part_stride;
  void* dbias;  // in the compute type, with bias' shape and contiguous, or null
  int64_t dbias_stride_b, dbias_stride_h, dbias_stride_t, dbias_stride_d;
  int64_t batch_units, head_units, splits;
  int64_t tile;  // keys per tile, a multiple of kPanel
  bool zeroed;   // dk and dv hold zeros, for keys that no row sees; else every key is some unit's
};

TFM_DECLARE_KERNEL(void attention_bwd(const AttentionBwd& args, DType dtype,
                                      std::atomic<int64_t>& next, char* scratch))

inline namespace CPU_CAPABILITY {
namespace {

// Where a worker's matrices lie; `bytes` in all. A panel: 64 queries.
template <typename C>
struct AttentionBwdScratch {
  // all queries of a head: (Tq, D) and (Tq, Dv), zero up to multiples of 16, and their transposes,
  // panel by panel
  C *q, *q_t, *dout, *dout_t, *dq_t;
  C *lse, *delta, *norm;
  int32_t *begins, *ends;    // (Tq) the columns that a row may see; none for rows that see nothing
  C *k, *k_t, *v, *dk, *dv;  // a tile of keys
  C *p, *dx;                 // (tile, panel)
  C *extras, *factors;       // (panel, tile); bias and keep as terms of the scores, and dropout's
  C *extras_t, *factors_t;   // (tile, panel)
  C *sum_dk, *sum_dv;        // over the heads of a group
  C* gathered;               // room for factors_of
  ColumnScratch columns;
  int64_t bytes;

  AttentionBwdScratch(const AttentionBwd& a, const void* data) {
    const int64_t queries = round_up(a.queries, kPanel), part = a.tile * kPanel;
    const int64_t d_pad = round_up(a.d, 16), dv_pad = round_up(a.dv, 16);
    const bool grouped = a.heads > a.kv_heads, extra = a.bias.data || a.keep.data;
    Scratch scratch(data);
    q = scratch.take<C>(queries * d_pad);
    q_t = scratch.take<C>(queries * a.d);
    dout = scratch.take<C>(queries * dv_pad);
    dout_t = scratch.take<C>(queries * a.dv);
    dq_t = scratch.take<C>(queries * a.d);
    lse = scratch.take<C>(queries);
    delta = scratch.take<C>(queries);
    norm = scratch.take<C>(queries);
    k = scratch.take<C>(a.tile * a.d);
    k_t = scratch.take<C>(a.tile * a.d);
    v = scratch.take<C>(a.tile * a.dv);
    p = scratch.take<C>(part);
    dx = scratch.take<C>(part);
    dk = scratch.take<C>(a.tile * d_pad);
    dv = scratch.take<C>(a.tile * dv_pad);
    sum_dk = scratch.take<C>(grouped ? a.keys * a.d : 0);
    sum_dv = scratch.take<C>(grouped ? a.keys * a.dv : 0);
    extras = scratch.take<C>(extra || a.dbias ? part : 0);
    extras_t = scratch.take<C>(part);
    factors = scratch.take<C>(a.dropout.active() ? part : 0);
    factors_t = scratch.take<C>(part);
    gathered = scratch.take<C>(a.dropout.active() ? round_up(a.keys, kPanel) : 0);
    begins = scratch.take<int32_t>(queries);
    ends = scratch.take<int32_t>(queries);
    columns = ColumnScratch(scratch, a.keys);
    bytes = scratch.bytes();
  }
};

}  // namespace
}  // namespace CPU_CAPABILITY
}  // namespace tfm_kernels
