// The host side of the attention kernels: checks the operators' arguments, and runs the workers.
#pragma once
#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <atomic>

#include "../check.h"
#include "attention.h"
#include "output.h"

namespace tfm_kernels {

// Below this many operations a call stays on its thread: waking the others costs as much.
constexpr double kSerialWork = 1e6;

inline DType attention_dtype(at::ScalarType dtype) {
  return dtype == at::kHalf       ? DType::f16
         : dtype == at::kBFloat16 ? DType::bf16
         : dtype == at::kDouble   ? DType::f64
                                  : DType::f32;
}

// A checked call; keeps alive what it had to copy. Nothing a caller passes lets a kernel read
// outside of its tensors.
class AttentionCall {
 public:
  AttentionCall(AttentionArgs& a, const char* op, const at::Tensor& query, const at::Tensor& key,
                const at::Tensor& value, const OptionalTensor& bias, const OptionalTensor& keep,
                const OptionalTensor& key_lengths, const OptionalTensor& cu_seqlens_q,
                const OptionalTensor& cu_seqlens_k, int64_t max_seqlen_q, int64_t max_seqlen_k,
                at::IntArrayRef window, double scale, double dropout_p, const OptionalTensor& seed)
      : dtype(attention_dtype(query.scalar_type())),
        packed(cu_seqlens_q.has_value()),
        batch(packed ? cu_seqlens_q->numel() - 1 : query.size(0)),
        queries(packed ? max_seqlen_q : query.size(2)) {
    check_floating(query, op, "query");
    const int64_t dims = packed ? 3 : 4, heads_axis = 1;
    for (const auto* t : {&query, &key, &value})
      TORCH_CHECK(t->dim() == dims && t->scalar_type() == query.scalar_type() && t->is_cpu(), op,
                  ": query, key and value must be CPU tensors of one dtype and of ", dims,
                  " dimensions");
    a.heads = query.size(heads_axis);
    a.kv_heads = key.size(heads_axis);
    a.d = query.size(-1);
    a.dv = value.size(-1);
    total_q = query.size(0);
    total_k = key.size(0);
    heads = a.heads;
    TORCH_CHECK(a.d >= 1 && a.dv >= 1, op, ": head dimensions must be at least 1");
    TORCH_CHECK(a.heads == a.kv_heads || (a.kv_heads > 0 && a.heads % a.kv_heads == 0), op,
                ": query must have a multiple of key's heads");
    TORCH_CHECK(packed == cu_seqlens_k.has_value(), op,
                ": cu_seqlens_q and cu_seqlens_k go together");
    const int64_t keys = packed ? max_seqlen_k : key.size(2);
    if (packed) {
      check_shape(key, {total_k, a.kv_heads, a.d}, op, "key");
      check_shape(value, {total_k, a.kv_heads, a.dv}, op, "value");
      TORCH_CHECK(!bias && !keep && !key_lengths, op,
                  ": packed calls take neither bias, keep nor key_lengths");
      a.cu_seqlens_q = segments(*cu_seqlens_q, batch, total_q, max_seqlen_q, op, owned[0]);
      a.cu_seqlens_k = segments(*cu_seqlens_k, batch, total_k, max_seqlen_k, op, owned[1]);
    } else {
      check_shape(key, {batch, a.kv_heads, keys, a.d}, op, "key");
      check_shape(value, {batch, a.kv_heads, keys, a.dv}, op, "value");
    }
    constexpr int64_t kLongest = int64_t{1} << 31;
    TORCH_CHECK(queries >= 0 && queries < kLongest && keys >= 0 && keys < kLongest, op,
                ": sequence lengths must lie in [0, 2^31)");
    TORCH_CHECK(window.size() == 4, op, ": window must hold 4 limits, got ", window.size());
    constexpr int64_t kFar = int64_t{1} << 40;
    a.low = std::clamp(window[0], -kFar, kFar);
    a.high = std::clamp(window[1], -kFar, kFar);
    a.end_low = std::clamp(window[2], -kFar, kFar);
    a.end_high = std::clamp(window[3], -kFar, kFar);
    a.batch = batch;
    a.queries = queries;
    a.keys = keys;
    a.scale = scale;
    a.dropout = check_dropout(dropout_p, seed, op);
    a.row_step = queries;
    a.q = view(query);
    a.k = view(key);
    a.v = view(value);
    if (bias) {
      const bool is_float = bias->scalar_type() == at::kFloat;
      TORCH_CHECK(is_float || bias->scalar_type() == query.scalar_type(), op,
                  ": bias must be float32 or of query's dtype, got ", bias->scalar_type());
      a.bias = pairs(*bias, keys, op, "bias");
      a.bias_is_float = is_float && query.scalar_type() != at::kFloat;
    }
    if (keep) {
      TORCH_CHECK(keep->scalar_type() == at::kBool, op, ": keep must be bool");
      a.keep = pairs(*keep, keys, op, "keep");
    }
    if (key_lengths) {
      TORCH_CHECK(key_lengths->dim() == 1 && key_lengths->numel() == batch, op,
                  ": key_lengths must have shape (", batch, "), got ", key_lengths->sizes());
      a.key_lengths = index(*key_lengths, op, owned[0]);
      for (int64_t b = 0; b < batch; ++b)
        TORCH_CHECK(a.key_lengths[b] >= 0 && a.key_lengths[b] <= keys, op,
                    ": key_lengths must lie in [0, ", keys, "], got ", a.key_lengths[b]);
    }
    a.lse_stride_b = packed ? 0 : a.heads * queries;
    a.lse_stride_h = packed ? total_q : queries;
    options = query.options();
  }

  // (B, H, T, D) or (total, H, D) as a view.
  AttentionView view(const at::Tensor& t) const {
    if (packed) return {t.const_data_ptr(), 0, t.stride(1), t.stride(0), t.stride(2)};
    return {t.const_data_ptr(), t.stride(0), t.stride(1), t.stride(2), t.stride(3)};
  }

  // An empty tensor of t's shape but for the last axis, stored as (B, T, H, width).
  at::Tensor like(const at::Tensor& t, int64_t width) const {
    if (packed) return new_output({t.size(0), t.size(1), width}, options);
    // as what PyTorch's own operators return: to autograd no view, so that it may be written into
    const at::AutoDispatchBelowADInplaceOrView untracked;
    return new_output({t.size(0), t.size(2), t.size(1), width}, options).transpose(1, 2);
  }

  std::vector<int64_t> lse_sizes() const {
    return packed ? std::vector<int64_t>{heads, total_q}
                  : std::vector<int64_t>{batch, heads, queries};
  }

  at::TensorOptions statistics() const {
    return options.dtype(dtype == DType::f64 ? at::kDouble : at::kFloat);
  }

  // Calls worker(next, scratch) on each of `threads` threads; they share out the units by `next`.
  template <typename Body>
  static void run(int64_t threads, int64_t bytes, Body worker) {
    std::atomic<int64_t> next{0};
    auto work = [&](int64_t, int64_t) {
      const at::Tensor scratch = at::empty({bytes + 64}, at::kByte);
      char* data = static_cast<char*>(scratch.mutable_data_ptr());
      worker(next, data + (64 - reinterpret_cast<uintptr_t>(data) % 64) % 64);
      gemm_release();
    };
    if (threads == 1)
      work(0, 1);
    else
      at::parallel_for(0, threads, 1, work);
  }

  const DType dtype;
  const bool packed;

 private:
  static const int64_t* index(const at::Tensor& t, const char* op, at::Tensor& owner) {
    TORCH_CHECK((t.scalar_type() == at::kInt || t.scalar_type() == at::kLong) && t.is_cpu(), op,
                ": lengths must be int32 or int64 on the CPU");
    owner = t.to(at::kLong).contiguous();
    return owner.const_data_ptr<int64_t>();
  }

  static const int64_t* segments(const at::Tensor& t, int64_t batch, int64_t total, int64_t longest,
                                 const char* op, at::Tensor& owner) {
    TORCH_CHECK(batch >= 0 && t.dim() == 1 && t.numel() == batch + 1, op,
                ": cu_seqlens_q and cu_seqlens_k must have shape (B + 1)");
    const int64_t* ends = index(t, op, owner);
    bool right = ends[0] == 0 && ends[batch] == total;
    for (int64_t b = 0; b < batch; ++b)
      right = right && ends[b] <= ends[b + 1] && ends[b + 1] - ends[b] <= longest;
    TORCH_CHECK(right, op, ": cu_seqlens must start at 0, never fall, end at ", total,
                " and step by at most ", longest);
    return ends;
  }

  // A tensor that broadcasts to (B, H, Tq, Tk).
  AttentionView pairs(const at::Tensor& t, int64_t keys, const char* op, const char* name) const {
    const int64_t full[4] = {batch, heads, queries, keys};
    TORCH_CHECK(t.dim() == 4 && t.is_cpu(), op, ": ", name, " must have 4 dimensions");
    int64_t strides[4];
    for (int i = 0; i < 4; ++i) {
      TORCH_CHECK(t.size(i) == full[i] || t.size(i) == 1, op, ": ", name, " must broadcast to (",
                  batch, ", ", heads, ", ", queries, ", ", keys, "), got ", t.sizes());
      strides[i] = t.size(i) == 1 ? 0 : t.stride(i);
    }
    return {t.const_data_ptr(), strides[0], strides[1], strides[2], strides[3]};
  }

  const int64_t batch, queries;
  int64_t heads = 0, total_q = 0, total_k = 0;
  at::Tensor owned[2];
  at::TensorOptions options;
};

}  // namespace tfm_kernels
