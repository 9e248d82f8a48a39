// One call of attention_bwd and a worker's scratch, as host and kernel share them.
#pragma once
#include <atomic>

#include "attention_columns.h"
#include "operand.h"

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

// Where a worker's matrices lie; `bytes` in all. A panel: 64 queries. Operands of products are of
// type O.
template <typename C, typename O>
struct AttentionBwdScratch {
  // all queries of a head as right operands: (Tq, D) and (Tq, Dv), zero up to multiples of 16, and
  // their transposes, panel by panel
  O *q, *q_t, *dout, *dout_t;
  O *q_rows, *dout_rows;  // a panel of them row-major, where operands are not
  C *dq_t, *dq;           // (D, Tq), and a panel of it turned
  C *lse, *delta, *norm;
  int32_t *begins, *ends;  // (Tq) the columns that a row may see; none for rows that see nothing
  O *k, *k_t, *v;          // a tile of keys as left operands
  C *dk, *dv;              // and its sums
  C *p, *dx;               // (tile, panel)
  O *p_left, *dx_left, *dx_right;  // the same as operands, where they are not
  C *extras, *factors;      // (panel, tile); bias and keep as terms of the scores, and dropout's
  C *extras_t, *factors_t;  // (tile, panel)
  C *sum_dk, *sum_dv;       // over the heads of a group
  C* gathered;              // room for factors_of
  ColumnScratch columns;
  int64_t bytes;

  AttentionBwdScratch(const AttentionBwd& a, const void* data) {
    const int64_t queries = round_up(a.queries, kPanel), part = a.tile * kPanel;
    const int64_t d_pad = round_up(a.d, 16), dv_pad = round_up(a.dv, 16);
    const bool grouped = a.heads > a.kv_heads, extra = a.bias.data || a.keep.data;
    Scratch scratch(data);
    const bool apart = !std::is_same_v<O, C>;
    q = scratch.take<O>(queries * d_pad);
    q_t = scratch.take<O>(queries * a.d);
    dout = scratch.take<O>(queries * dv_pad);
    dout_t = scratch.take<O>(queries * a.dv);
    q_rows = scratch.take<O>(apart ? kPanel * d_pad : 0);
    dout_rows = scratch.take<O>(apart ? kPanel * dv_pad : 0);
    dq_t = scratch.take<C>(queries * a.d);
    dq = scratch.take<C>(kPanel * d_pad);
    lse = scratch.take<C>(queries);
    delta = scratch.take<C>(queries);
    norm = scratch.take<C>(queries);
    k = scratch.take<O>(a.tile * a.d);
    k_t = scratch.take<O>(a.tile * a.d);
    v = scratch.take<O>(a.tile * a.dv);
    p = scratch.take<C>(part);
    dx = scratch.take<C>(part);
    p_left = scratch.take<O>(apart ? part : 0);
    dx_left = scratch.take<O>(apart ? part : 0);
    dx_right = scratch.take<O>(apart ? part : 0);
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
