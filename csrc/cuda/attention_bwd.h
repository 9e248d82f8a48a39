// What the backward kernels of attention and their binding share. Plain C++.
#pragma once
#include "attention.h"

namespace tfm_kernels {

struct AttentionBwd {
  Attention call;
  Heads out, dout;          // as q, of Dv elements
  Heads dq, dk, dv;         // written
  const float *lse, *dlse;  // (B, Hq, Tq) or (Hq, total); dlse may be absent
  float* rows;              // four numbers for each of them: RowNumbers of attention_bwd_tile.cuh
  void* dbias;              // contiguous, of the bias' type and shape; null where not wanted
  int bias_b, bias_h, bias_q, bias_k;  // its shape
};

// Launch one kernel each; null, or what went wrong. The rows come first.
const char* launch_rows(const AttentionBwd& args, Stream stream);     // the numbers of each row
const char* launch_keys(const AttentionBwd& args, Stream stream);     // dk, dv
const char* launch_queries(const AttentionBwd& args, Stream stream);  // dq
const char* launch_bias(const AttentionBwd& args, Stream stream);     // dbias

}  // namespace tfm_kernels
