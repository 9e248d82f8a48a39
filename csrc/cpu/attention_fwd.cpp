// attention_fwd, CPU: the operator. The kernel is in attention_fwd_tile.cpp.
#ifdef CPU_CAPABILITY_DEFAULT
#include "attention_fwd.h"

#include <ATen/Parallel.h>
#include <torch/library.h>

#include <tuple>

#include "attention_call.h"
#include "operators.h"

namespace tfm_kernels {
namespace {

// Queries and keys per tile, and units per head, by shape alone.
void pick_config(AttentionFwd& a, int64_t threads) {
  a.rows = a.queries >= 768 ? 128 : std::clamp<int64_t>(round_up(a.queries, 8), 8, 64);
  a.tile = std::clamp<int64_t>(round_up(a.keys, kPanel), kPanel, 512);
  const int64_t heads = std::max<int64_t>(1, a.batch * a.heads);
  const int64_t tiles = std::max<int64_t>(1, ceil_div(a.queries, a.rows));
  a.chunks = heads >= 4 * threads ? 1 : std::min(tiles, ceil_div(4 * threads, heads));
}

}  // namespace

std::tuple<at::Tensor, at::Tensor> attention_fwd_cpu(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const OptionalTensor& bias, const OptionalTensor& keep, const OptionalTensor& key_lengths,
    const OptionalTensor& cu_seqlens_q, const OptionalTensor& cu_seqlens_k, int64_t max_seqlen_q,
    int64_t max_seqlen_k, at::IntArrayRef window, double scale, double dropout_p,
    const OptionalTensor& seed, bool /*deterministic*/) {
  constexpr const char* kOp = "attention_fwd_cpu";
  AttentionFwd a{};
  const AttentionCall call(a, kOp, query, key, value, bias, keep, key_lengths, cu_seqlens_q,
                           cu_seqlens_k, max_seqlen_q, max_seqlen_k, window, scale, dropout_p,
                           seed);
  at::Tensor out = call.like(query, a.dv), lse = at::empty(call.lse_sizes(), call.statistics());
  a.out = call.view(out);
  a.lse = lse.mutable_data_ptr();
  const double work = 4.0 * a.batch * a.heads * a.queries * a.keys * (a.d + a.dv) / 2;
  const int64_t threads =
      work < (a.queries == 1 ? kSerialWork / 8 : kSerialWork) ? 1 : at::get_num_threads();
  pick_config(a, threads);
  // one query is no tile: its products are sums that widen what they read
  a.bf16_tiles = a.queries > 1 && takes_bf16_tiles(call.dtype, {a.d});
  const int64_t bytes = for_operands(call.dtype, a.bf16_tiles, [&](auto zero, auto operand) {
    return AttentionFwdScratch<compute_t<decltype(zero)>, decltype(operand)>(a, nullptr).bytes;
  });
  call.run(threads, bytes, [&](std::atomic<int64_t>& next, char* scratch) {
    TFM_KERNEL(attention_fwd)(a, call.dtype, next, scratch);
  });
  return {out, lse};
}

TORCH_LIBRARY_IMPL(tfm_kernels, CPU, m) { m.impl("attention_fwd_cpu", &attention_fwd_cpu); }

}  // namespace tfm_kernels
#endif
