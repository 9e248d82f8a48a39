// attention_bwd, CPU: the kernel. Implements A.5 to A.10 of tfm_kernels/ops/attention.py.
// Owns:    one unit = the keys of one key head (every n-th tile of them where heads are few), and
//          all (batch, key head) that share a slice of dbias; so no two units add to one number,
//          and every sum has a fixed order.
// Method:  scores are recomputed transposed, (keys, queries): then p^T and dx^T are the left
//          factors of dv and dk as they stand, dq^T = k^T dx^T needs no transpose either, and lse
//          and delta are vectors along the lanes. A tile of keys meets panels of 64 queries.
// Traffic: reads q, k, v, out, dout, lse once per unit, writes dq, dk, dv once; 10 Tq Tk D
//          operations per head, fewer where keys are hidden. Where units split the keys of a head,
//          each writes a dq of its own, and the host adds them up.
// Limits:  none; float64 computes in float64 by plain loops, everything else in float32, with
//          bfloat16 products where the CPU has them.
// Source:  own work, after Dao 2023, arXiv:2307.08691, algorithm 2.
#include "attention_bwd_rows.h"
#include "attention_bwd_weights.h"

namespace tfm_kernels {
inline namespace CPU_CAPABILITY {
namespace {

template <typename T, typename O>
class Worker {
  using C = compute_t<T>;
  using V = at::vec::Vectorized<C>;
  static constexpr C kInfinity = std::numeric_limits<C>::infinity();

 public:
  Worker(const AttentionBwd& args, char* scratch)
      : a(args), d_pad(round_up(args.d, 16)), dv_pad(round_up(args.dv, 16)), mem(args, scratch) {
    std::fill_n(mem.extras_t, a.tile * kPanel, C(0));
    std::fill_n(mem.factors_t, a.tile * kPanel, C(1));
  }

  void unit(int64_t u) {
    split = u % a.splits;
    const int64_t kv_unit = u / a.splits % a.head_units, b_unit = u / a.splits / a.head_units;
    const int64_t batches = a.batch / a.batch_units, kvs = a.kv_heads / a.head_units;
    for (int64_t b = b_unit * batches; b < (b_unit + 1) * batches; ++b)
      for (int64_t kv = kv_unit * kvs; kv < (kv_unit + 1) * kvs; ++kv) key_head(b, kv);
  }

 private:
  // All heads of the group that key head kv serves.
  void key_head(int64_t b, int64_t head) {
    s = sequence_of(a, b);
    kv = head;
    const int64_t group = a.heads / a.kv_heads;
    if (group > 1) {
      std::fill_n(mem.sum_dk, s.tk * a.d, C(0));
      std::fill_n(mem.sum_dv, s.tk * a.dv, C(0));
    }
    for (h = kv * group; h < (kv + 1) * group; ++h) {
      columns = find_columns<T>(a, s, h, mem.columns);
      far = take_queries<T>(a, s, h, columns, mem) > kFar;
      if (far) normalise();
      for (int64_t c = split * a.tile; c < columns.count; c += a.splits * a.tile) {
        take_keys(c);
        started = false;
        for (int64_t i = 0; i < s.tq; i += kPanel) panel(i);
        if (!started && !a.zeroed) start();
        if (started) give_keys(group > 1);
      }
      give_queries<T>(a, s, h, split, mem);
    }
    if (group > 1)
      for (int64_t j = 0; j < s.tk; ++j)
        if (mine(j)) give_row(j, mem.sum_dk + j * a.d, mem.sum_dv + j * a.dv);
  }

  // Whether key j is one that this unit writes; units share keys only where the group's heads have
  // the same columns.
  bool mine(int64_t j) const {
    const int64_t column = j - columns.first;
    return a.splits == 1 ||
           (column >= 0 && column < columns.range && column / a.tile % a.splits == split);
  }

  static int64_t padded_keys(int64_t n) { return padded_rows(n, 16, kPanel); }

  void take_keys(int64_t c) {
    column0 = c;
    count = std::min(a.tile, columns.count - c);
    load_columns<T>(a.k, s, kv, columns, c, count, a.d, mem.k, a.d);
    load_columns<T>(a.v, s, kv, columns, c, count, a.dv, mem.v, a.dv);
    const int64_t padded = padded_keys(count);
    std::fill(mem.k + count * a.d, mem.k + padded * a.d, O(0));
    std::fill(mem.v + count * a.dv, mem.v + padded * a.dv, O(0));
    turn_left(mem.k, a.d, padded, a.d, mem.k_t, a.tile);
  }

  // The part of the tile that rows i.. of a panel see: its first column and how many, both
  // multiples of 16 that the matrix library has compiled code for.
  bool meet(int64_t i) {
    part.rows = std::min(kPanel, s.tq - i);
    part.lanes = round_up(part.rows, 16);
    int64_t low = count, high = 0;
    part.full = true;
    for (int64_t r = i; r < i + part.rows; ++r) {
      if (mem.begins[r] >= mem.ends[r]) continue;  // weights of 0 by its lse
      low = std::min<int64_t>(low, mem.begins[r] - column0);
      high = std::max<int64_t>(high, mem.ends[r] - column0);
    }
    low = std::max<int64_t>(low, 0) / kPanel * kPanel;
    high = std::min(high, count);
    if (low >= high) return false;
    for (int64_t r = i; r < i + part.rows; ++r)
      part.full = part.full && (mem.begins[r] >= mem.ends[r] ||
                                (mem.begins[r] <= column0 + low && mem.ends[r] >= column0 + high));
    part.begin = low;
    part.column = column0 + low;
    part.width = high - low;
    part.padded_width = padded_keys(part.width);
    // the columns that fill up the part are keys too, which no row of this panel sees
    if (high < count && part.width < part.padded_width) part.full = false;
    return true;
  }

  // Scores of the part, transposed, into p; bias and keep beside them. False if keep hides it all.
  bool scores(int64_t i) {
    if (a.bias.data || columns.elementwise) {
      bool any = false;
      for (int64_t r = 0; r < part.lanes; ++r) {
        C* x = mem.extras + r * a.tile;
        std::fill_n(x, part.padded_width, C(0));
        if (r >= part.rows) continue;
        add_extras<T>(a, s, h, columns, i + r, part.column, part.width, C(1), x);
        for (int64_t j = 0; j < part.width && !any; ++j) any = x[j] != -kInfinity;
      }
      if (!any) return false;
      transpose_widen(mem.extras, a.tile, part.lanes, part.padded_width, mem.extras_t, kPanel,
                      part.lanes);
      neutral = false;
    } else if (!neutral) {
      std::fill_n(mem.extras_t, a.tile * kPanel, C(0));
      neutral = true;
    }
    gemm_tile(part.padded_width, part.lanes, a.d, mem.k + part.begin * a.d, a.d, mem.q_t + i * a.d,
              kPanel, mem.p, kPanel, false);
    return true;
  }

  // Rows i.. against the tile: adds to dk, dv, dq_t and dbias.
  void panel(int64_t i) {
    if (!meet(i) || !scores(i)) return;
    gemm_tile(part.padded_width, part.lanes, a.dv, mem.v + part.begin * a.dv, a.dv,
              mem.dout_t + i * a.dv, kPanel, mem.dx, kPanel, false);
    if (a.dropout.active()) {
      for (int64_t r = 0; r < part.rows; ++r)
        factors_of(a, s, h, columns, i + r, part.column, part.width, mem.factors + r * a.tile,
                   mem.gathered);
      transpose_widen(mem.factors, a.tile, part.rows, part.width, mem.factors_t, kPanel, part.rows);
    }
    if (a.bias.data || columns.elementwise || a.dropout.active() || far)
      weights<true, true>(mem, part, a.scale, i);
    else if (part.full)
      weights<false, false>(mem, part, a.scale, i);
    else
      weights<true, false>(mem, part, a.scale, i);
    if (!started) start();
    const int64_t n = part.padded_width * kPanel;
    const O *p = as_left(mem.p, n, mem.p_left), *dx = as_left(mem.dx, n, mem.dx_left);
    const O* right = as_right(mem.dx, part.padded_width, kPanel, mem.dx_right);
    for (int64_t e = 0; e < dv_pad; e += kPanel)
      gemm_tile(part.padded_width, std::min(kPanel, dv_pad - e), part.lanes, p, kPanel,
                mem.dout + i * dv_pad + kPair<O> * e, dv_pad, mem.dv + part.begin * dv_pad + e,
                dv_pad, true);
    for (int64_t e = 0; e < d_pad; e += kPanel)
      gemm_tile(part.padded_width, std::min(kPanel, d_pad - e), part.lanes, dx, kPanel,
                mem.q + i * d_pad + kPair<O> * e, d_pad, mem.dk + part.begin * d_pad + e, d_pad,
                true);
    gemm_tile(a.d, part.lanes, part.padded_width, mem.k_t + part.begin, a.tile, right, kPanel,
              mem.dq_t + i * a.d, kPanel, true);
    if (a.dbias) add_dbias(i);
  }

  void start() {
    std::fill_n(mem.dk, padded_keys(count) * d_pad, C(0));
    std::fill_n(mem.dv, padded_keys(count) * dv_pad, C(0));
    started = true;
  }

  // Where |lse| is so large that float32 has lost log(sum) beside the maximum, the weights are
  // brought to the sum 1 by hand.
  void normalise() {
    for (int64_t i = 0; i < s.tq; i += kPanel) {
      alignas(64) C total[kPanel] = {};
      for (int64_t c = 0; c < columns.count; c += a.tile) {
        take_keys(c);
        if (!meet(i) || !scores(i)) continue;
        for (int64_t l = 0; l < part.lanes; l += V::size()) {
          Weights<C, true, true> at(mem, part, a.scale, i + l);
          V sum = V::loadu(total + l);
          for (int64_t j = l; j < l + part.width * kPanel; j += kPanel)
            sum = sum + at.next(V::loadu(mem.p + j), V::loadu(mem.extras_t + j));
          sum.store(total + l);
        }
      }
      for (int64_t l = 0; l < kPanel; ++l)
        if (std::abs(mem.lse[i + l]) > kFar && mem.lse[i + l] < kInfinity && total[l] > C(0))
          mem.norm[i + l] = C(1) / total[l];
    }
  }

  // A.10 of the part in dx.
  void add_dbias(int64_t i) {
    transpose_widen(mem.dx, kPanel, part.padded_width, part.lanes, mem.extras, a.tile,
                    part.padded_width);
    for (int64_t r = 0; r < part.rows; ++r) {
      C* out = static_cast<C*>(a.dbias) + s.b * a.dbias_stride_b + h * a.dbias_stride_h +
               (i + r) * a.dbias_stride_t;
      const C* x = mem.extras + r * a.tile;
      if (a.dbias_stride_d == 0) {
        C sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t j = 0; j < part.width; ++j) sum += x[j];
        *out += sum;
      } else if (columns.index) {
        for (int64_t j = 0; j < part.width; ++j) out[columns.index[part.column + j]] += x[j];
      } else {
        out += columns.first + part.column;
        if (r + kAhead < part.rows) prefetch(out + kAhead * a.dbias_stride_t, part.width);
        for (int64_t j = 0; j < part.width; ++j) out[j] += x[j];
      }
    }
  }

  // The tile's dk and dv: to the sums over the group, or out.
  void give_keys(bool grouped) {
    for (int64_t c = 0; c < count; ++c) {
      const int64_t j = columns.key(column0 + c);
      C *dk_row = mem.dk + c * d_pad, *dv_row = mem.dv + c * dv_pad;
      if (!grouped) {
        give_row(j, dk_row, dv_row);
        continue;
      }
      for (int64_t e = 0; e < a.d; ++e) mem.sum_dk[j * a.d + e] += dk_row[e];
      for (int64_t e = 0; e < a.dv; ++e) mem.sum_dv[j * a.dv + e] += dv_row[e];
    }
  }

  void give_row(int64_t j, C* dk_row, C* dv_row) {
    const C kept = a.dropout.active() ? static_cast<C>(a.dropout.scale) : C(1);
    for (int64_t e = 0; e < a.d; ++e) dk_row[e] *= static_cast<C>(a.scale);
    for (int64_t e = 0; e < a.dv; ++e) dv_row[e] *= kept;
    store_row<T>(dk_row, a.d, const_cast<T*>(at_head<T>(a.dk, s, kv, s.k0 + j)), a.dk.stride_d);
    store_row<T>(dv_row, a.dv, const_cast<T*>(at_head<T>(a.dv_out, s, kv, s.k0 + j)),
                 a.dv_out.stride_d);
  }

  static constexpr C kFar = 65536;
  const AttentionBwd& a;
  const int64_t d_pad, dv_pad;
  const AttentionBwdScratch<C, O> mem;
  Sequence s{-1, 0, 0, 0, 0, 0, 0, 0};
  Columns columns;
  int64_t h = 0, kv = 0, split = 0;
  int64_t column0 = 0, count = 0;  // the tile
  Part part;
  bool started = false, far = false;
  bool neutral = true;  // extras_t holds zeros
};

}  // namespace

void attention_bwd(const AttentionBwd& args, DType dtype, std::atomic<int64_t>& next,
                   char* scratch) {
  for_operands(dtype, args.bf16_tiles, [&](auto zero, auto operand) {
    Worker<decltype(zero), decltype(operand)> worker(args, scratch);
    const int64_t units = args.batch_units * args.head_units * args.splits;
    for (int64_t u = next++; u < units; u = next++) worker.unit(u);
  });
}

}  // namespace CPU_CAPABILITY
}  // namespace tfm_kernels
