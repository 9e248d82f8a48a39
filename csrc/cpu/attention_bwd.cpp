// attention_bwd, CPU. Implements A.5 to A.10 of tfm_kernels/ops/attention.py.
// Owns:    one unit = the keys of one key head (every n-th tile of them where heads are few), and
//          all (batch, key head) that share a slice of dbias; so no two units add to one number,
//          and every sum has a fixed order.
// Method:  scores are recomputed transposed, (keys, queries): then p^T and dx^T are the left
//          factors of dv and dk as they stand, dq^T = k^T dx^T needs no transpose either, and lse
//          and delta are vectors along the lanes. A tile of keys meets panels of 64 queries.
// Traffic: reads q, k, v, out, dout, lse once per unit, writes dq, dk, dv once; 10 Tq Tk D
//          operations per head, fewer where keys are hidden. Where units split the keys of a head,
//          each writes a dq of its own, and the host adds them up.
// Limits:  none; float64 computes in float64 by plain loops, everything else in float32.
// Source:  own work, after Dao 2023, arXiv:2307.08691, algorithm 2.
#include <atomic>

#include "attention.h"

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

// Where a worker's matrices lie: elements of the compute type, then bytes for the columns.
struct AttentionBwdScratch {
  int64_t q, q_t, dout, dout_t, dq_t, lse, delta, norm, k, k_t, v, p, dx, dk, dv, sum_dk, sum_dv,
      extras, extras_t, factors, factors_t, gather, elements, bytes;

  AttentionBwdScratch(const AttentionBwd& a, int64_t element_size) {
    auto up = [](int64_t n, int64_t step) { return (n + step - 1) / step * step; };
    const int64_t queries = up(a.queries, 64), keys = up(a.keys, 64);
    const int64_t d = up(a.d, 16), dv_pad = up(a.dv, 16), group = a.heads / a.kv_heads;
    const bool tiles = a.bias.data || a.keep.data;
    int64_t at = 0;
    auto take = [&](int64_t n) { return std::exchange(at, at + up(n, 16)); };
    q = take(queries * d);
    q_t = take(queries * a.d);
    dout = take(queries * dv_pad);
    dout_t = take(queries * a.dv);
    dq_t = take(queries * a.d);
    lse = take(queries);
    delta = take(queries);
    norm = take(queries);
    k = take(a.tile * a.d);
    k_t = take(a.tile * a.d);
    v = take(a.tile * a.dv);
    p = take(a.tile * 64);
    dx = take(a.tile * 64);
    dk = take(a.tile * d);
    dv = take(a.tile * dv_pad);
    sum_dk = take(group > 1 ? a.keys * a.d : 0);
    sum_dv = take(group > 1 ? a.keys * a.dv : 0);
    extras = take(tiles || a.dbias ? a.tile * 64 : 0);
    extras_t = take(a.tile * 64);
    factors = take(a.dropout.active() ? a.tile * 64 : 0);
    factors_t = take(a.tile * 64);
    gather = take(a.dropout.active() ? keys : 0);
    elements = at;
    bytes = at * element_size + 2 * queries * 4 + (keys + 1) * 9 + 64;
  }
};

inline namespace CPU_CAPABILITY {
namespace {

template <typename T>
class Worker {
  using C = compute_t<T>;
  using V = at::vec::Vectorized<C>;
  static constexpr C kInfinity = std::numeric_limits<C>::infinity();
  static constexpr C kLog2E = static_cast<C>(1.4426950408889634);

 public:
  Worker(const AttentionBwd& args, char* scratch)
      : a(args), d_pad(round_up(args.d, 16)), dv_pad(round_up(args.dv, 16)) {
    const AttentionBwdScratch at(args, sizeof(C));
    C* base = reinterpret_cast<C*>(scratch);
    q = base + at.q;
    q_t = base + at.q_t;
    dout = base + at.dout;
    dout_t = base + at.dout_t;
    dq_t = base + at.dq_t;
    lse = base + at.lse;
    delta = base + at.delta;
    norm = base + at.norm;
    k = base + at.k;
    k_t = base + at.k_t;
    v = base + at.v;
    p = base + at.p;
    dx = base + at.dx;
    dk = base + at.dk;
    dv = base + at.dv;
    sum_dk = base + at.sum_dk;
    sum_dv = base + at.sum_dv;
    extras = base + at.extras;
    extras_t = base + at.extras_t;
    factors = base + at.factors;
    factors_t = base + at.factors_t;
    gathered = base + at.gather;
    begins = reinterpret_cast<int32_t*>(base + at.elements);
    ends = begins + round_up(a.queries, kPanel);
    const int64_t keys = round_up(a.keys, kPanel);
    columns_scratch.index = ends + round_up(a.queries, kPanel);
    columns_scratch.rank = columns_scratch.index + keys;
    columns_scratch.alive = reinterpret_cast<uint8_t*>(columns_scratch.rank + keys + 1);
    std::fill_n(extras_t, a.tile * kPanel, C(0));
    std::fill_n(factors_t, a.tile * kPanel, C(1));
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
      std::fill_n(sum_dk, s.tk * a.d, C(0));
      std::fill_n(sum_dv, s.tk * a.dv, C(0));
    }
    for (h = kv * group; h < (kv + 1) * group; ++h) {
      columns = find_columns<T>(a, s, h, columns_scratch);
      take_queries();
      if (far) normalise();
      for (int64_t c = split * a.tile; c < columns.count; c += a.splits * a.tile) {
        take_keys(c);
        started = false;
        for (int64_t i = 0; i < s.tq; i += kPanel) panel(i);
        if (!started && !a.zeroed) start();
        if (started) give_keys(group > 1);
      }
      give_queries();
    }
    if (group > 1)
      for (int64_t j = 0; j < s.tk; ++j)
        if (mine(j)) give_row(j, sum_dk + j * a.d, sum_dv + j * a.dv);
  }

  // Whether key j is one that this unit writes.
  bool mine(int64_t j) const {
    const int64_t column = j - columns.first;
    return column >= 0 && column < columns.range &&
           (a.splits == 1 || column / a.tile % a.splits == split);
  }

  // q, dout and their transposes, lse, delta and the visible columns of every row of head h.
  void take_queries() {
    far = false;
    const C* in_lse = static_cast<const C*>(a.lse) + lse_at(0);
    const C* in_dlse = a.dlse ? static_cast<const C*>(a.dlse) + lse_at(0) : nullptr;
    const int64_t padded = round_up(s.tq, 16);
    for (int64_t i = 0; i < padded; ++i) {
      C *q_row = q + i * d_pad, *dout_row = dout + i * dv_pad;
      std::fill_n(q_row, d_pad, C(0));
      std::fill_n(dout_row, dv_pad, C(0));
      begins[i] = ends[i] = 0;
      norm[i] = C(1);
      delta[i] = C(0);
      lse[i] = kInfinity;  // weights of 0
      if (i >= s.tq) continue;
      if (i + kAhead < s.tq) {
        prefetch(at_head<T>(a.dout, s, h, s.q0 + i + kAhead), a.dv);
        prefetch(at_head<T>(a.out, s, h, s.q0 + i + kAhead), a.dv);
        prefetch(at_head<T>(a.q, s, h, s.q0 + i + kAhead), a.d);
      }
      const C l = in_lse[i];
      begins[i] = static_cast<int32_t>(columns.from(i + s.low));
      ends[i] = static_cast<int32_t>(columns.from(i + s.high + 1));
      if (begins[i] >= ends[i] || row_hidden(a, s, h, i) || l == -kInfinity) {
        begins[i] = ends[i] = 0;
        continue;
      }
      load_row(at_head<T>(a.dout, s, h, s.q0 + i), a.dout.stride_d, a.dv, dout_row);
      if (!(l < kInfinity)) {  // a row with NaN: NaN for the keys it sees, and for no other
        lse[i] = std::numeric_limits<C>::quiet_NaN();
        continue;
      }
      lse[i] = l;
      far = far || std::abs(l) > kFar;
      load_row(at_head<T>(a.q, s, h, s.q0 + i), a.q.stride_d, a.d, q_row);
      load_row(at_head<T>(a.out, s, h, s.q0 + i), a.out.stride_d, a.dv, p);
      const double sum = sum_lanes<C>(
          a.dv, [&]<typename W>(int64_t e) { return load<W>(dout_row + e) * load<W>(p + e); });
      delta[i] = static_cast<C>(sum) - (in_dlse ? in_dlse[i] : C(0));
    }
    for (int64_t i = 0; i < padded; i += kPanel) {
      const int64_t n = std::min(kPanel, padded - i);
      transpose(n, a.d, q + i * d_pad, d_pad, q_t + i * a.d, kPanel);
      transpose(n, a.dv, dout + i * dv_pad, dv_pad, dout_t + i * a.dv, kPanel);
      for (int64_t e = 0; e < a.d; ++e) std::fill_n(dq_t + i * a.d + e * kPanel, n, C(0));
    }
  }

  // Rows of a matrix tile: few sizes, because the matrix library compiles code for each.
  static int64_t padded_keys(int64_t n) { return round_up(n, n <= kPanel ? 16 : kPanel); }

  void take_keys(int64_t c) {
    column0 = c;
    count = std::min(a.tile, columns.count - c);
    load_columns<T>(a.k, s, kv, columns, c, count, a.d, k, a.d);
    load_columns<T>(a.v, s, kv, columns, c, count, a.dv, v, a.dv);
    const int64_t padded = padded_keys(count);
    std::fill(k + count * a.d, k + padded * a.d, C(0));
    std::fill(v + count * a.dv, v + padded * a.dv, C(0));
    transpose(padded, a.d, k, a.d, k_t, a.tile);
  }

  // The part of the tile that rows i.. of a panel see: its first column and how many, both
  // multiples of 16 that the matrix library has compiled code for.
  bool meet(int64_t i) {
    rows = std::min(kPanel, s.tq - i);
    lanes = round_up(rows, 16);
    int64_t low = count, high = 0;
    full = true;
    for (int64_t r = i; r < i + rows; ++r) {
      if (begins[r] >= ends[r]) continue;  // weights of 0 by its lse
      low = std::min<int64_t>(low, begins[r] - column0);
      high = std::max<int64_t>(high, ends[r] - column0);
    }
    low = std::max<int64_t>(low, 0) / kPanel * kPanel;
    high = std::min(high, count);
    if (low >= high) return false;
    for (int64_t r = i; r < i + rows; ++r)
      full = full &&
             (begins[r] >= ends[r] || (begins[r] <= column0 + low && ends[r] >= column0 + high));
    begin = low;
    width = high - low;
    padded_width = padded_keys(width);
    // the columns that fill up the part are keys too, which no row of this panel sees
    if (high < count && width < padded_width) full = false;
    return true;
  }

  // Scores of the part, transposed, into p; bias and keep beside them. False if keep hides it all.
  bool scores(int64_t i) {
    if (a.bias.data || columns.elementwise) {
      bool any = false;
      for (int64_t r = 0; r < lanes; ++r) {
        C* x = extras + r * a.tile;
        std::fill_n(x, padded_width, C(0));
        if (r >= rows) continue;
        add_extras<T>(a, s, h, columns, i + r, column0 + begin, width, x);
        for (int64_t j = 0; j < width && !any; ++j) any = x[j] != -kInfinity;
      }
      if (!any) return false;
      transpose(lanes, padded_width, extras, a.tile, extras_t, kPanel);
      neutral = false;
    } else if (!neutral) {
      std::fill_n(extras_t, a.tile * kPanel, C(0));
      neutral = true;
    }
    gemm_tile(padded_width, lanes, a.d, k + begin * a.d, a.d, q_t + i * a.d, kPanel, p, kPanel,
              false);
    return true;
  }

  // Rows i.. against the tile: adds to dk, dv, dq_t and dbias.
  void panel(int64_t i) {
    if (!meet(i) || !scores(i)) return;
    gemm_tile(padded_width, lanes, a.dv, v + begin * a.dv, a.dv, dout_t + i * a.dv, kPanel, dx,
              kPanel, false);
    if (a.dropout.active()) {
      for (int64_t r = 0; r < rows; ++r)
        factors_of(a, s, h, columns, i + r, column0 + begin, width, factors + r * a.tile, gathered);
      transpose(rows, width, factors, a.tile, factors_t, kPanel);
    }
    if (a.bias.data || columns.elementwise || a.dropout.active() || far)
      weights<true, true>(i);
    else if (full)
      weights<false, false>(i);
    else
      weights<true, false>(i);
    if (!started) start();
    for (int64_t e = 0; e < dv_pad; e += kPanel)
      gemm_tile(padded_width, std::min(kPanel, dv_pad - e), lanes, p, kPanel, dout + i * dv_pad + e,
                dv_pad, dv + begin * dv_pad + e, dv_pad, true);
    for (int64_t e = 0; e < d_pad; e += kPanel)
      gemm_tile(padded_width, std::min(kPanel, d_pad - e), lanes, dx, kPanel, q + i * d_pad + e,
                d_pad, dk + begin * d_pad + e, d_pad, true);
    gemm_tile(a.d, lanes, padded_width, k_t + begin, a.tile, dx, kPanel, dq_t + i * a.d, kPanel,
              true);
    if (a.dbias) add_dbias(i);
  }

  void start() {
    std::fill_n(dk, padded_keys(count) * d_pad, C(0));
    std::fill_n(dv, padded_keys(count) * dv_pad, C(0));
    started = true;
  }

  // A.3 of V::size() rows, i.. in panel order, for one key after another.
  template <bool kMasked, bool kExtras>
  struct Weights {
    // lse in units of log2 unless there are extras; first and end count from the part's first
    // column
    static constexpr C kUnit = kExtras ? C(1) : kLog2E;
    V step, shift, first, end, column{C(0)};

    Weights(const Worker& w, int64_t i)
        : step(static_cast<C>(w.a.scale) * kUnit), shift(V::loadu(w.lse + i) * V(kUnit)) {
      if constexpr (kMasked) {
        alignas(64) C bounds[2][V::size()];
        for (int64_t l = 0; l < V::size(); ++l) {
          const int64_t part = w.column0 + w.begin;
          bounds[0][l] = static_cast<C>(std::clamp<int64_t>(w.begins[i + l] - part, 0, w.width));
          bounds[1][l] = static_cast<C>(std::clamp<int64_t>(w.ends[i + l] - part, 0, w.width));
        }
        first = V::loadu(bounds[0]);
        end = V::loadu(bounds[1]);
      }
    }

    V next(V x, V extra) {
      if constexpr (kExtras)
        x = (x * step + extra - shift) * V(kLog2E);
      else
        x = at::vec::fmsub(x, step, shift);
      const V zero(C(0));
      V result = exp2_fast(at::vec::clamp_max(x, zero));
      if constexpr (kMasked) {
        result = V::blendv(zero, result, (column >= first) & (column < end));
        column = column + V(C(1));
      }
      if constexpr (kExtras) result = V::blendv(result, zero, extra == V(-kInfinity));
      return result;
    }
  };

  // A.3, A.6, A.7: scores in p and dout v^T in dx become (p f)^T and dx^T.
  template <bool kMasked, bool kExtras>
  void weights(int64_t i) {
    for (int64_t l = 0; l < lanes; l += V::size()) {
      Weights<kMasked, kExtras> at(*this, i + l);
      const V less = V::loadu(delta + i + l), to_one = V::loadu(norm + i + l);
      for (int64_t j = l; j < l + padded_width * kPanel; j += kPanel) {
        const V x = V::loadu(p + j), product = V::loadu(dx + j);
        if constexpr (kExtras) {
          const V w = to_one * at.next(x, V::loadu(extras_t + j)), f = V::loadu(factors_t + j);
          (w * f).store(p + j);
          (w * at::vec::fmsub(product, f, less)).store(dx + j);
        } else {
          const V w = at.next(x, x);
          w.store(p + j);
          (w * (product - less)).store(dx + j);
        }
      }
    }
  }

  // Where |lse| is so large that float32 has lost log(sum) beside the maximum, the weights are
  // brought to the sum 1 by hand.
  void normalise() {
    for (int64_t i = 0; i < s.tq; i += kPanel) {
      alignas(64) C total[kPanel] = {};
      for (int64_t c = 0; c < columns.count; c += a.tile) {
        take_keys(c);
        if (!meet(i) || !scores(i)) continue;
        for (int64_t l = 0; l < lanes; l += V::size()) {
          Weights<true, true> at(*this, i + l);
          V sum = V::loadu(total + l);
          for (int64_t j = l; j < l + width * kPanel; j += kPanel)
            sum = sum + at.next(V::loadu(p + j), V::loadu(extras_t + j));
          sum.store(total + l);
        }
      }
      for (int64_t l = 0; l < kPanel; ++l)
        if (std::abs(lse[i + l]) > kFar && lse[i + l] < kInfinity && total[l] > C(0))
          norm[i + l] = C(1) / total[l];
    }
  }

  // A.10 of the part in dx.
  void add_dbias(int64_t i) {
    transpose(padded_width, lanes, dx, kPanel, extras, a.tile);
    for (int64_t r = 0; r < rows; ++r) {
      C* out = static_cast<C*>(a.dbias) + s.b * a.dbias_stride_b + h * a.dbias_stride_h +
               (i + r) * a.dbias_stride_t;
      const C* x = extras + r * a.tile;
      if (a.dbias_stride_d == 0) {
        C sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t j = 0; j < width; ++j) sum += x[j];
        *out += sum;
      } else if (columns.index) {
        for (int64_t j = 0; j < width; ++j) out[columns.index[column0 + begin + j]] += x[j];
      } else {
        out += columns.first + column0 + begin;
        if (r + kAhead < rows) prefetch(out + kAhead * a.dbias_stride_t, width);
        for (int64_t j = 0; j < width; ++j) out[j] += x[j];
      }
    }
  }

  // The tile's dk and dv: to the sums over the group, or out.
  void give_keys(bool grouped) {
    for (int64_t c = 0; c < count; ++c) {
      const int64_t j = columns.key(column0 + c);
      C *dk_row = dk + c * d_pad, *dv_row = dv + c * dv_pad;
      if (!grouped) {
        give_row(j, dk_row, dv_row);
        continue;
      }
      for (int64_t e = 0; e < a.d; ++e) sum_dk[j * a.d + e] += dk_row[e];
      for (int64_t e = 0; e < a.dv; ++e) sum_dv[j * a.dv + e] += dv_row[e];
    }
  }

  void give_row(int64_t j, C* dk_row, const C* dv_row) {
    for (int64_t e = 0; e < a.d; ++e) dk_row[e] *= static_cast<C>(a.scale);
    store_row<T>(dk_row, a.d, const_cast<T*>(at_head<T>(a.dk, s, kv, s.k0 + j)), a.dk.stride_d);
    store_row<T>(dv_row, a.dv, const_cast<T*>(at_head<T>(a.dv_out, s, kv, s.k0 + j)),
                 a.dv_out.stride_d);
  }

  void give_queries() {
    for (int64_t i = 0; i < s.tq; ++i) {
      if (i % kPanel == 0)
        transpose(a.d, std::min(kPanel, round_up(s.tq, 16) - i), dq_t + i * a.d, kPanel,
                  q + i * d_pad, d_pad);
      C* row = q + i * d_pad;
      const bool sees = begins[i] < ends[i];
      for (int64_t e = 0; e < a.d; ++e) row[e] = sees ? row[e] * static_cast<C>(a.scale) : C(0);
      if (a.dq_parts)
        std::copy_n(row, a.d,
                    static_cast<C*>(a.dq_parts) + split * a.part_stride + lse_at(i) * a.d);
      else
        store_row<T>(row, a.d, const_cast<T*>(at_head<T>(a.dq, s, h, s.q0 + i)), a.dq.stride_d);
    }
  }

  int64_t lse_at(int64_t i) const { return s.b * a.lse_stride_b + h * a.lse_stride_h + s.q0 + i; }

  static constexpr C kFar = 65536;
  const AttentionBwd& a;
  const int64_t d_pad, dv_pad;
  C *q, *q_t, *dout, *dout_t, *dq_t, *lse, *delta, *norm;  // all queries of a head
  C *k, *k_t, *v, *dk, *dv;                                // a tile of keys
  C *p, *dx, *extras, *extras_t, *factors, *factors_t;     // a tile of keys by a panel of queries
  C *sum_dk, *sum_dv, *gathered;
  int32_t *begins, *ends;  // (Tq) the columns that a row may see; none for rows that see nothing
  ColumnScratch columns_scratch;
  Sequence s{-1, 0, 0, 0, 0, 0, 0, 0};
  Columns columns;
  int64_t h = 0, kv = 0, split = 0;
  int64_t column0 = 0, count = 0;                                       // the tile
  int64_t rows = 0, lanes = 0, begin = 0, width = 0, padded_width = 0;  // the part
  bool full = false, started = false, far = false;
  bool neutral = true;  // extras_t holds zeros
};

}  // namespace

void attention_bwd(const AttentionBwd& args, DType dtype, std::atomic<int64_t>& next,
                   char* scratch) {
  for_dtype(dtype, [&](auto zero) {
    Worker<decltype(zero)> worker(args, scratch);
    const int64_t units = args.batch_units * args.head_units * args.splits;
    for (int64_t u = next++; u < units; u = next++) worker.unit(u);
  });
}

}  // namespace CPU_CAPABILITY
}  // namespace tfm_kernels

#ifdef CPU_CAPABILITY_DEFAULT
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <tuple>

#include "attention_call.h"

namespace tfm_kernels {
namespace {

// The tile and the units: what shares a slice of dbias stays in one unit.
void pick_config(AttentionBwd& a, int64_t threads) {
  const int64_t longest = a.d + a.dv <= 128 ? 256 : a.d + a.dv <= 256 ? 128 : 64;
  a.tile = std::clamp<int64_t>((a.keys + 63) / 64 * 64, 64, longest);
  a.batch_units = a.dbias && a.dbias_stride_b == 0 ? 1 : a.batch;
  a.head_units = a.dbias && a.dbias_stride_h == 0 ? 1 : a.kv_heads;
  const int64_t units = std::max<int64_t>(1, a.batch_units * a.head_units);
  const int64_t tiles = std::max<int64_t>(1, (a.keys + a.tile - 1) / a.tile);
  // Keys that are left out differ from head to head, so a group's heads could not share the work.
  const bool grouped = a.heads != a.kv_heads && (a.keep.data || a.bias.data);
  const bool splits =
      threads > 1 && units < 2 * threads && !grouped && !(a.dbias && a.dbias_stride_d == 0);
  a.splits = splits ? std::min(tiles, (2 * threads + units - 1) / units) : 1;
}

// Whether the band lets some row see each key and nothing else hides any, so that the units write
// all of dk and dv.
bool covers_all_keys(const AttentionBwd& a) {
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
    parts = at::empty(sizes, statistics);
    a.dq_parts = parts.mutable_data_ptr();
    a.part_stride = parts.stride(0);
  }
  const int64_t bytes = AttentionBwdScratch(a, lse.element_size()).bytes;
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
