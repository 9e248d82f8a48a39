// What the bindings of the attention kernels do first: check an operator's arguments and turn them
// into a kernel's.
#pragma once
#include "attention.h"
#include "binding.h"

namespace tfm_kernels {

// A checked call; keeps alive what it had to copy. Nothing that a caller passes lets a kernel read
// outside of its tensors.
class AttentionCall {
 public:
  const char* op;
  Attention args{};

  AttentionCall(const char* name, const Tensor& query, const Tensor& key, const Tensor& value,
                const OptionalTensor& bias, const OptionalTensor& keep,
                const OptionalTensor& key_lengths, const OptionalTensor& ends_q,
                const OptionalTensor& ends_k, int64_t max_q, int64_t max_k,
                const std::vector<int64_t>& window, double scale, double dropout_p,
                const OptionalTensor& seed)
      : op(name), packed(ends_q.has_value()) {
    Attention& a = args;
    const int64_t dims = packed ? 3 : 4;
    a.type = dtype_of(query, op, "query");
    for (const Tensor* t : {&query, &key, &value})
      STD_TORCH_CHECK(t->dim() == dims && t->scalar_type() == query.scalar_type() &&
                          t->size(dims - 1) >= 1 && t->size(dims - 1) <= Attention::kWidest,
                      op, ": query, key and value must be of one dtype and of ", dims,
                      " dimensions, the last of 1 to ", Attention::kWidest);
    STD_TORCH_CHECK(packed == ends_k.has_value(), op,
                    ": cu_seqlens_q and cu_seqlens_k go together");
    STD_TORCH_CHECK(!packed || !(bias || keep || key_lengths), op,
                    ": packed calls take neither bias, keep nor key_lengths");
    const int64_t heads = query.size(1), kv_heads = key.size(1);
    const int64_t batch = packed ? ends_q->numel() - 1 : query.size(0);
    const int64_t queries = packed ? max_q : query.size(2), keys = packed ? max_k : key.size(2);
    STD_TORCH_CHECK(heads == kv_heads || (kv_heads > 0 && heads % kv_heads == 0), op,
                    ": query must have a multiple of key's ", kv_heads, " heads, got ", heads);
    for (const int64_t length : {queries, keys})
      STD_TORCH_CHECK(length >= 0 && length < Attention::kLongest && batch >= 0, op,
                      ": lengths must lie in [0, 2**30), got ", length);
    a.d = static_cast<int>(query.size(dims - 1));
    a.dv = static_cast<int>(value.size(dims - 1));
    if (packed) {
      check_like(key, query, {key.size(0), kv_heads, a.d}, op, "key");
      check_like(value, query, {key.size(0), kv_heads, a.dv}, op, "value");
    } else {
      check_like(key, query, {batch, kv_heads, keys, a.d}, op, "key");
      check_like(value, query, {batch, kv_heads, keys, a.dv}, op, "value");
    }
    STD_TORCH_CHECK(window.size() == 4, op, ": window must hold 4 limits, got ", window.size());
    const auto limit = [&](int i) {
      return std::clamp(window[static_cast<size_t>(i)], -Attention::kFar, Attention::kFar);
    };
    a.low = limit(0), a.high = limit(1), a.end_low = limit(2), a.end_high = limit(3);
    a.batch = static_cast<int>(batch);
    a.heads = static_cast<int>(heads);
    a.group = kv_heads > 0 ? static_cast<int>(heads / kv_heads) : 1;
    a.queries = static_cast<int>(queries);
    a.keys = static_cast<int>(keys);
    a.total_q = query.size(0), a.total_k = key.size(0);
    a.lse_stride_b = packed ? 0 : heads * queries;
    a.lse_stride_h = packed ? a.total_q : queries;
    a.row_step = queries;
    a.q = this->heads(query), a.k = this->heads(key), a.v = this->heads(value);
    a.bias = pairs(bias, query, "bias");
    check_beside(bias, a.type, op, "bias");
    a.keep = pairs(keep, query, "keep");
    check_type(keep, ScalarType::Bool, op, "keep");
    a.lengths = indices(key_lengths, query, batch, "key_lengths", 0);
    a.ends_q = indices(ends_q, query, batch + 1, "cu_seqlens_q", 1);
    a.ends_k = indices(ends_k, query, batch + 1, "cu_seqlens_k", 2);
    a.dropout = DropoutRule(dropout_p, seed, {}, query, 0, op).dropout;
    // a scale below all scores that float32 can tell apart is 0
    constexpr double kNothing = 0x1p-120, kLog2E = 1.4426950408889634;
    a.scale = std::abs(scale) > kNothing ? static_cast<float>(scale) : 0.0f;
    a.scored = bias.has_value() || !(a.scale > 0.0f);
    a.unit = a.scored ? 1.0f : a.scale;
    a.step = static_cast<float>(a.scored ? kLog2E : scale * kLog2E);
  }

  // (B, H, T, D) or (total, H, D) as kernels take it.
  Heads heads(const Tensor& t) const {
    Heads found{t.const_data_ptr(),       packed ? 0 : t.stride(0), t.stride(1),
                t.stride(packed ? 0 : 2), t.stride(packed ? 2 : 3), false};
    const int size = kItemSize[static_cast<int>(args.type)];
    const auto whole = [&](int64_t count) { return count * size % 16 == 0; };
    const int64_t last = t.dim() - 1;
    found.aligned = (found.stride_d == 1 || t.size(last) == 1) &&
                    reinterpret_cast<uintptr_t>(found.data) % 16 == 0;
    for (int64_t axis = 0; axis < last; ++axis)
      found.aligned = found.aligned && (t.size(axis) <= 1 || whole(t.stride(axis)));
    return found;
  }

  // A result, which is stored in packs of 16 bytes only where its rows are whole packs: the strides
  // of a tensor of one row do not say so.
  Heads result(const Tensor& t) const {
    Heads found = heads(t);
    const int64_t bytes = t.size(t.dim() - 1) * kItemSize[static_cast<int>(args.type)];
    found.aligned = found.aligned && bytes % 16 == 0;
    return found;
  }

  // Empty, of t's shape but for the last axis, stored as (B, T, H, width).
  Tensor empty_like(const Tensor& t, int width) const {
    if (packed) return empty(t, {t.size(0), t.size(1), width}, t.scalar_type());
    return torch::stable::transpose(
        empty(t, {t.size(0), t.size(2), t.size(1), width}, t.scalar_type()), 1, 2);
  }

  // The shape of a number per row: (B, Hq, Tq) or (Hq, total).
  std::vector<int64_t> statistics_sizes() const {
    if (packed) return {args.heads, args.total_q};
    return {args.batch, args.heads, args.queries};
  }

 private:
  bool packed;
  OptionalTensor owned[3];

  Pairs pairs(const OptionalTensor& t, const Tensor& like, const char* name) const {
    Pairs found;
    if (!t) return found;
    const int64_t full[] = {args.batch, args.heads, args.queries, args.keys};
    int64_t* strides[] = {&found.stride_b, &found.stride_h, &found.stride_t, &found.stride_d};
    STD_TORCH_CHECK(t->dim() == 4, op, ": ", name, " must have 4 dimensions, got ", t->dim());
    check_like(*t, like, t->sizes(), op, name);
    for (int axis = 0; axis < 4; ++axis) {
      const int64_t size = t->size(axis);
      STD_TORCH_CHECK(size == 1 || size == full[axis], op, ": ", name,
                      " must broadcast to the scores' shape");
      *strides[axis] = size == 1 ? 0 : t->stride(axis);
    }
    found.data = t->const_data_ptr();
    found.type = t->scalar_type() == ScalarType::Float ? DType::f32 : args.type;
    return found;
  }

  Indices indices(const OptionalTensor& t, const Tensor& like, int64_t count, const char* name,
                  int place) {
    if (!t) return {};
    check_like(*t, like, {count}, op, name);
    const bool is_64 = t->scalar_type() == ScalarType::Long;
    STD_TORCH_CHECK(is_64 || t->scalar_type() == ScalarType::Int, op, ": ", name,
                    " must be int32 or int64");
    owned[place] = torch::stable::contiguous(*t);
    return {owned[place]->const_data_ptr(), is_64};
  }
};

}  // namespace tfm_kernels
