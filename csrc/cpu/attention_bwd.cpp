// attention_bwd, CPU: the operator. The kernel is in attention_bwd_tile.cpp.
#ifdef CPU_CAPABILITY_DEFAULT
#include "attention_bwd.h"

#include <ATen/Parallel.h>
#include <torch/library.h>

#include <tuple>

#include "attention_call.h"

namespace tfm_kernels {
namespace {

// The tile and the units: what shares a slice of dbias stays in one unit.
void pick_config(AttentionBwd& a, int64_t threads) {
  const int64_t longest = a.d + a.dv <= 128 ? 256 : a.d + a.dv <= 256 ? 128 : 64;
  a.tile = std::clamp<int64_t>(round_up(a.keys, kPanel), kPanel, longest);
  a.batch_units = a.dbias && a.dbias_stride_b == 0 ? 1 : a.batch;
  a.head_units = a.dbias && a.dbias_stride_h == 0 ? 1 : a.kv_heads;
  const int64_t units = std::max<int64_t>(1, a.batch_units * a.head_units);
  const int64_t tiles = std::max<int64_t>(1, ceil_div(a.keys, a.tile));
  // Keys that are left out differ from head to head, so a group's heads could not share the work.
  const bool grouped = a.heads != a.kv_heads && (a.keep.data || a.bias.data);
  const bool splits =
      threads > 1 && units < 2 * threads && !grouped && !(a.dbias && a.dbias_stride_d == 0);
  a.splits = splits ? std::min(tiles, ceil_div(2 * threads, units)) : 1;
}

// Whether the band lets some row see each key and nothing else hides any, so that the units write
// all of dk and dv.
bool covers_all_keys(const AttentionBwd& a) {
  if (a.heads == 0) return false;
  if (a.keep.data || a.bias.data || a.key_lengths || a.cu_seqlens_q || a.batch == 0) return false;
  const Sequence s = sequence_of(a, 0);
  return s.tq > 0 && s.low <= 0 && s.low <= s.high && s.tq + s.high >= s.tk;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> attention_bwd_cpu(
    const at::Tensor& dout, const OptionalTensor& dlse, const at::Tensor& query,
    const at::Tensor& key, const at::Tensor& value, const at::Tensor& out, const at::Tensor& lse,
    const OptionalTensor& bias, const OptionalTensor& keep, const OptionalTensor& key_lengths,
    const OptionalTensor& cu_seqlens_q, const OptionalTensor& cu_seqlens_k, int64_t max_seqlen_q,
    int64_t max_seqlen_k, at::IntArrayRef window, double scale, double dropout_p,
    const OptionalTensor& seed, bool /*deterministic*/, bool need_dbias) {
  constexpr const char* kOp = "attention_bwd_cpu";
  AttentionBwd a{};
  const AttentionCall call(a, kOp, query, key, value, bias, keep, key_lengths, cu_seqlens_q,
                           cu_seqlens_k, max_seqlen_q, max_seqlen_k, window, scale, dropout_p,
                           seed);
  const auto statistics = call.statistics();
  auto out_sizes = query.sizes().vec();
  out_sizes.back() = a.dv;
  for (const auto* t : {&dout, &out})
    TORCH_CHECK(t->sizes() == out_sizes && t->scalar_type() == query.scalar_type() && t->is_cpu(),
                kOp, ": out and dout must have shape ", out_sizes, " and query's dtype, got ",
                t->sizes());
  const auto check_lse = [&](const at::Tensor& t, const char* name) {
    check_shape(t, call.lse_sizes(), kOp, name);
    TORCH_CHECK(t.scalar_type() == c10::typeMetaToScalarType(statistics.dtype()), kOp, ": ", name,
                " must be ", statistics.dtype());
    return t.contiguous();
  };
  const at::Tensor saved = check_lse(lse, "lse");
  const at::Tensor given = dlse ? check_lse(*dlse, "dlse") : at::Tensor();
  TORCH_CHECK(!need_dbias || bias, kOp, ": need_dbias needs a bias");

  at::Tensor dq = call.like(query, a.d), dk = call.like(key, a.d), dv = call.like(value, a.dv);
  a.zeroed = !covers_all_keys(a);
  if (a.zeroed) {
    dk.zero_();
    dv.zero_();
  }
  at::Tensor dbias =
      need_dbias ? at::zeros(bias->sizes(), statistics) : at::empty({0}, query.options());
  a.out = call.view(out);
  a.dout = call.view(dout);
  a.dq = call.view(dq);
  a.dk = call.view(dk);
  a.dv_out = call.view(dv);
  a.lse = saved.const_data_ptr();
  a.dlse = given.defined() ? given.const_data_ptr() : nullptr;
  if (need_dbias) {
    a.dbias = dbias.mutable_data_ptr();
    int64_t* const strides[] = {&a.dbias_stride_b, &a.dbias_stride_h, &a.dbias_stride_t,
                                &a.dbias_stride_d};
    const int64_t full[] = {a.batch, a.heads, a.queries, a.keys};
    for (int i = 0; i < 4; ++i)
      *strides[i] = dbias.size(i) == 1 && full[i] != 1 ? 0 : dbias.stride(i);
  }
  const double work = 10.0 * a.batch * a.heads * a.queries * a.keys * (a.d + a.dv) / 2;
  const int64_t threads = work < kSerialWork ? 1 : at::get_num_threads();
  pick_config(a, threads);
  at::Tensor parts;
  if (a.splits > 1) {
    std::vector<int64_t> sizes = call.lse_sizes();
    sizes.insert(sizes.begin(), a.splits);
    sizes.push_back(a.d);
    parts = new_output(sizes, statistics);
    a.dq_parts = parts.mutable_data_ptr();
    a.part_stride = parts.stride(0);
  }
  a.bf16_tiles = takes_bf16_tiles(call.dtype, {a.d, a.dv});
  const int64_t bytes = for_operands(call.dtype, a.bf16_tiles, [&](auto zero, auto operand) {
    return AttentionBwdScratch<compute_t<decltype(zero)>, decltype(operand)>(a, nullptr).bytes;
  });
  call.run(threads, bytes, [&](std::atomic<int64_t>& next, char* scratch) {
    TFM_KERNEL(attention_bwd)(a, call.dtype, next, scratch);
  });
  if (a.splits > 1) dq.copy_(call.packed ? parts.sum(0).transpose(0, 1) : parts.sum(0));
  if (need_dbias) dbias = dbias.to(bias->scalar_type());
  return {dq, dk, dv, dbias};
}

TORCH_LIBRARY_IMPL(tfm_kernels, CPU, m) { m.impl("attention_bwd_cpu", &attention_bwd_cpu); }

}  // namespace
}  // namespace tfm_kernels
#endif
