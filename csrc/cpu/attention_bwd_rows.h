// The queries of one head in the backward: laid out for all tiles of keys, and dq given back.
#pragma once
#include <cmath>

#include "attention_bwd.h"
#include "transpose.h"

namespace tfm_kernels {
inline namespace CPU_CAPABILITY {
namespace {

// Fills q, dout and their transposes, lse, delta, norm and the visible columns of every row of head
// h, and dq_t with zeros. The largest |lse| of a row whose weights are finite.
template <typename T, typename C = compute_t<T>>
C take_queries(const AttentionBwd& a, const Sequence& s, int64_t h, const Columns& columns,
               const AttentionBwdScratch<C>& mem) {
  constexpr C kInfinity = std::numeric_limits<C>::infinity();
  const int64_t d_pad = round_up(a.d, 16), dv_pad = round_up(a.dv, 16);
  C largest = 0;
  const C* in_lse = static_cast<const C*>(a.lse) + lse_at(a, s, h, 0);
  const C* in_dlse = a.dlse ? static_cast<const C*>(a.dlse) + lse_at(a, s, h, 0) : nullptr;
  const int64_t padded = round_up(s.tq, 16);
  for (int64_t i = 0; i < padded; ++i) {
    C *q_row = mem.q + i * d_pad, *dout_row = mem.dout + i * dv_pad;
    std::fill_n(q_row, d_pad, C(0));
    std::fill_n(dout_row, dv_pad, C(0));
    mem.begins[i] = mem.ends[i] = 0;
    mem.norm[i] = C(1);
    mem.delta[i] = C(0);
    mem.lse[i] = kInfinity;  // weights of 0
    if (i >= s.tq) continue;
    if (i + kAhead < s.tq) {
      prefetch(at_head<T>(a.dout, s, h, s.q0 + i + kAhead), a.dv);
      prefetch(at_head<T>(a.out, s, h, s.q0 + i + kAhead), a.dv);
      prefetch(at_head<T>(a.q, s, h, s.q0 + i + kAhead), a.d);
    }
    const C l = in_lse[i];
    mem.begins[i] = static_cast<int32_t>(columns.from(i + s.low));
    mem.ends[i] = static_cast<int32_t>(columns.from(i + s.high + 1));
    if (mem.begins[i] >= mem.ends[i] || row_hidden(a, s, h, i) || l == -kInfinity) {
      mem.begins[i] = mem.ends[i] = 0;
      continue;
    }
    load_row(at_head<T>(a.dout, s, h, s.q0 + i), a.dout.stride_d, a.dv, dout_row);
    if (!(l < kInfinity)) {  // a row with NaN: NaN for the keys it sees, and for no other
      mem.lse[i] = std::numeric_limits<C>::quiet_NaN();
      continue;
    }
    mem.lse[i] = l;
    largest = std::max(largest, std::abs(l));
    load_row(at_head<T>(a.q, s, h, s.q0 + i), a.q.stride_d, a.d, q_row);
    load_row(at_head<T>(a.out, s, h, s.q0 + i), a.out.stride_d, a.dv, mem.p);
    const double sum = sum_lanes<C>(
        a.dv, [&]<typename W>(int64_t e) { return load<W>(dout_row + e) * load<W>(mem.p + e); });
    mem.delta[i] = static_cast<C>(sum) - (in_dlse ? in_dlse[i] : C(0));
  }
  for (int64_t i = 0; i < padded; i += kPanel) {
    const int64_t n = std::min(kPanel, padded - i);
    transpose_widen(mem.q + i * d_pad, d_pad, n, a.d, mem.q_t + i * a.d, kPanel, n);
    transpose_widen(mem.dout + i * dv_pad, dv_pad, n, a.dv, mem.dout_t + i * a.dv, kPanel, n);
    for (int64_t e = 0; e < a.d; ++e) std::fill_n(mem.dq_t + i * a.d + e * kPanel, n, C(0));
  }
  return largest;
}

// Stores dq of head h, or this split's share of it; q is lost.
template <typename T, typename C = compute_t<T>>
void give_queries(const AttentionBwd& a, const Sequence& s, int64_t h, int64_t split,
                  const AttentionBwdScratch<C>& mem) {
  const int64_t d_pad = round_up(a.d, 16);
  for (int64_t i = 0; i < s.tq; ++i) {
    if (i % kPanel == 0)
      transpose_widen(mem.dq_t + i * a.d, kPanel, a.d, std::min(kPanel, round_up(s.tq, 16) - i),
                      mem.q + i * d_pad, d_pad, a.d);
    C* row = mem.q + i * d_pad;
    const bool sees = mem.begins[i] < mem.ends[i];
    for (int64_t e = 0; e < a.d; ++e) row[e] = sees ? row[e] * static_cast<C>(a.scale) : C(0);
    if (a.dq_parts)
      std::copy_n(row, a.d,
                  static_cast<C*>(a.dq_parts) + split * a.part_stride + lse_at(a, s, h, i) * a.d);
    else
      store_row<T>(row, a.d, const_cast<T*>(at_head<T>(a.dq, s, h, s.q0 + i)), a.dq.stride_d);
  }
}

}  // namespace
}  // namespace CPU_CAPABILITY
}  // namespace tfm_kernels
