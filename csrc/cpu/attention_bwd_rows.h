// The queries of one head in the backward: laid out for all tiles of keys, and dq given back.
#pragma once
#include <cmath>

#include "attention_bwd.h"
#include "transpose.h"

namespace tfm_kernels {
inline namespace CPU_CAPABILITY {
namespace {

// dout . out of row i, whose dout is loaded already.
template <typename T, typename O, typename C = compute_t<T>>
double dot_of(const AttentionBwd& a, const Sequence& s, int64_t h, int64_t i, const O* dout_row) {
  constexpr int64_t kStep = 1024;
  alignas(64) C out[kStep], dout[kStep];
  double sum = 0.0;
  for (int64_t e = 0; e < a.dv; e += kStep) {
    const int64_t n = std::min(kStep, a.dv - e);
    load_row(at_head<T>(a.out, s, h, s.q0 + i) + e * a.out.stride_d, a.out.stride_d, n, out);
    load_row(dout_row + e, 1, n, dout);
    sum += sum_lanes<C>(
        n, [&]<typename W>(int64_t j) { return load<W>(dout + j) * load<W>(out + j); });
  }
  return sum;
}

// Lays out n rows of a panel, a multiple of 16, that lie row-major: as a right operand, unless they
// are one, and turned, as another.
template <typename O>
void lay_out(const O* rows, int64_t ld, int64_t n, int64_t width, O* right, O* turned) {
  turn_right(rows, ld, n, width, turned, kPanel, n);
  if constexpr (kPair<O> == 2)
    for (int64_t r = 0; r < n; r += 2)
      pair_rows(rows + r * ld, rows + (r + 1) * ld, ld, right + r * ld);
}

// Fills q, dout and their transposes, lse, delta, norm and the visible columns of every row of head
// h, and dq_t with zeros. The largest |lse| of a row whose weights are finite.
template <typename T, typename O, typename C = compute_t<T>>
C take_queries(const AttentionBwd& a, const Sequence& s, int64_t h, const Columns& columns,
               const AttentionBwdScratch<C, O>& mem) {
  constexpr C kInfinity = std::numeric_limits<C>::infinity();
  const int64_t d_pad = round_up(a.d, 16), dv_pad = round_up(a.dv, 16);
  C largest = 0;
  const C* in_lse = static_cast<const C*>(a.lse) + lse_at(a, s, h, 0);
  const C* in_dlse = a.dlse ? static_cast<const C*>(a.dlse) + lse_at(a, s, h, 0) : nullptr;
  const int64_t padded = round_up(s.tq, 16);
  O *q_rows = mem.q_rows, *dout_rows = mem.dout_rows;  // of the present panel
  const auto take_query = [&](int64_t i, O* q_row, O* dout_row) {
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
      return C(0);
    }
    load_row(at_head<T>(a.dout, s, h, s.q0 + i), a.dout.stride_d, a.dv, dout_row);
    if (!(l < kInfinity)) {  // a row with NaN: NaN for the keys it sees, and for no other
      mem.lse[i] = std::numeric_limits<C>::quiet_NaN();
      return C(0);
    }
    mem.lse[i] = l;
    load_row(at_head<T>(a.q, s, h, s.q0 + i), a.q.stride_d, a.d, q_row);
    mem.delta[i] = static_cast<C>(dot_of<T>(a, s, h, i, dout_row)) - (in_dlse ? in_dlse[i] : C(0));
    return std::abs(l);
  };
  for (int64_t i = 0; i < padded; ++i) {
    const int64_t r = i % kPanel;
    if constexpr (std::is_same_v<O, C>) {
      q_rows = mem.q + (i - r) * d_pad;
      dout_rows = mem.dout + (i - r) * dv_pad;
    }
    O *q_row = q_rows + r * d_pad, *dout_row = dout_rows + r * dv_pad;
    std::fill_n(q_row, d_pad, O(0));
    std::fill_n(dout_row, dv_pad, O(0));
    mem.begins[i] = mem.ends[i] = 0;
    mem.norm[i] = C(1);
    mem.delta[i] = C(0);
    mem.lse[i] = kInfinity;  // weights of 0
    if (i < s.tq) largest = std::max(largest, take_query(i, q_row, dout_row));
    if (r != kPanel - 1 && i != padded - 1) continue;
    lay_out(q_rows, d_pad, r + 1, a.d, mem.q + (i - r) * d_pad, mem.q_t + (i - r) * a.d);
    lay_out(dout_rows, dv_pad, r + 1, a.dv, mem.dout + (i - r) * dv_pad,
            mem.dout_t + (i - r) * a.dv);
    zero_lanes(mem.dq_t + (i - r) * a.d, kPanel, a.d, r + 1);
  }
  return largest;
}

// Stores dq of head h, or this split's share of it.
template <typename T, typename O, typename C = compute_t<T>>
void give_queries(const AttentionBwd& a, const Sequence& s, int64_t h, int64_t split,
                  const AttentionBwdScratch<C, O>& mem) {
  const int64_t d_pad = round_up(a.d, 16);
  for (int64_t i = 0; i < s.tq; ++i) {
    if (i % kPanel == 0)
      transpose_widen(mem.dq_t + i * a.d, kPanel, a.d, std::min(kPanel, round_up(s.tq, 16) - i),
                      mem.dq, d_pad, a.d);
    C* row = mem.dq + i % kPanel * d_pad;
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
