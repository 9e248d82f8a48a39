// attention_fwd, CPU: the kernel. Implements A.1 to A.4 of tfm_kernels/ops/attention.py.
// Owns:    one unit = some query tiles of one head; a worker takes units until none is left, and
//          keeps the head's keys (transposed) and values packed in panels of 64 columns while it
//          stays with it. A tile of up to 128 queries meets up to 512 keys at a time: scores,
//          running maximum and sum, and the output rows stay in L2.
// Traffic: reads q once, k and v once per head and worker; writes out and lse once. 4 Tq Tk D
//          operations per head, fewer where keys are hidden: keys that no row sees are not packed,
//          blocks of 64 keys that a tile does not see are skipped.
// Limits:  none; float64 computes in float64 by plain loops, everything else in float32, with
//          bfloat16 products where the CPU has them.
// Source:  own work, after Dao 2023, arXiv:2307.08691, algorithm 1.
#include "attention_fwd.h"
#include "attention_one_query.h"
#include "attention_panels.h"
#include "softmax.h"
#include "transpose.h"

namespace tfm_kernels {
inline namespace CPU_CAPABILITY {
namespace {

template <typename T, typename O>
class Worker {
  using C = compute_t<T>;
  static constexpr C kNothing = -std::numeric_limits<C>::infinity();

 public:
  Worker(const AttentionFwd& args, char* scratch)
      : a(args),
        plain(!args.bias.data && args.scale > 0),
        dv_pad(round_up(args.dv, 16)),
        log2_step(static_cast<C>((plain ? args.scale : 1.0) * kLog2E)),
        mem(args, scratch) {}

  void unit(int64_t u) {
    const int64_t head = u / a.chunks, chunk = u % a.chunks;
    take_head(head / a.heads, head % a.heads);
    for (int64_t i = chunk * a.rows; i < s.tq; i += a.chunks * a.rows)
      tile(i, std::min(a.rows, s.tq - i));
  }

 private:
  // Finds and packs the columns of head h, unless they are at hand.
  void take_head(int64_t b, int64_t head) {
    const int64_t group = a.heads / a.kv_heads, kv = head / group;
    const bool same = b == s.b && packed >= 0 &&
                      (packed == head || (packed / group == kv && a.keep.stride_h == 0 &&
                                          (!a.bias.data || a.bias.stride_h == 0)));
    h = head;
    if (same) return;
    s = sequence_of(a, b);
    packed = head;
    columns = find_columns<T>(a, s, h, mem.columns);
    padded = round_up(columns.count, kPanel);
    const bool direct = direct_rows(a.k);
    one_k = nullptr;
    v_direct = nullptr;
    if (a.queries == 1 && a.k.stride_d == 1 && a.v.stride_d == 1 && !columns.index) {
      one_k = at_head<T>(a.k, s, kv, s.k0 + columns.first);
      one_v = at_head<T>(a.v, s, kv, s.k0 + columns.first);
      return;
    }
    for (int64_t c = 0; c < columns.count; c += kPanel) {
      const int64_t n = std::min(kPanel, columns.count - c);
      O* panel = mem.k_panels + c * a.d;  // (D, kPanel)
      const O* rows = mem.q;
      int64_t step = a.d;
      if constexpr (std::is_same_v<T, O>) {
        if (direct && a.k.stride_t % kPair<O> == 0) {
          rows = at_head<T>(a.k, s, kv, s.k0 + columns.key(c));
          step = a.k.stride_t;
        }
      }
      if (rows == mem.q)
        load_columns<T>(a.k, s, kv, columns, c, n, a.d, mem.q, a.d);
      else
        for (int64_t j = c + n; j < std::min(c + n + kPanel, columns.count); ++j)
          prefetch(at_head<T>(a.k, s, kv, s.k0 + columns.key(j)), a.d);  // of the next panel
      turn_right(rows, step, n, a.d, panel, kPanel, round_up(n, 16));
    }
    if constexpr (std::is_same_v<T, C>) {
      // for few tiles of queries a copy, which lies better in the cache, does not pay
      if (direct_rows(a.v) && a.dv % 16 == 0 && columns.count % 16 == 0 && s.tq <= 4 * a.rows) {
        v_direct = at_head<T>(a.v, s, kv, s.k0 + columns.first);
        return;
      }
    }
    for (int64_t e = 0; e < a.dv; e += kPanel) {
      AttentionView part = a.v;
      part.data = static_cast<const T*>(a.v.data) + e * a.v.stride_d;
      pack_values<T>(part, s, kv, columns, std::min(kPanel, a.dv - e), std::min(kPanel, dv_pad - e),
                     mem.v_panels + e * padded);
    }
  }

  // Whether the columns' rows of keys or values can be used where they lie.
  bool direct_rows(const AttentionView& view) const {
    return view.stride_d == 1 && !columns.index && !columns.alive;
  }

  // Rows first..first+n-1 against all their keys.
  void tile(int64_t first, int64_t n) {
    row0 = first;
    count = n;
    int64_t low = columns.count, high = 0;
    all_from = 0, all_to = columns.count;
    for (int64_t r = 0; r < n; ++r) {
      mem.begins[r] = columns.from(first + r + s.low);
      mem.ends[r] = std::max(mem.begins[r], columns.from(first + r + s.high + 1));
      if (row_hidden(a, s, h, first + r)) mem.ends[r] = mem.begins[r];
      all_from = std::max(all_from, mem.begins[r]);
      all_to = std::min(all_to, mem.ends[r]);
      if (mem.begins[r] == mem.ends[r]) continue;
      low = std::min(low, mem.begins[r]);
      high = std::max(high, mem.ends[r]);
    }
    m = n <= 2 ? n : n <= 4 ? 4 : padded_rows(n, 8, 32);
    take_queries();
    std::fill_n(mem.tops, n, kNothing);
    std::fill_n(mem.sums, n, C(0));

    bool started = false;
    for (int64_t c = low / kPanel * kPanel; c < high;) {
      Blocks blocks;
      for (; c < high && blocks.count < a.tile / kPanel; c += kPanel) {
        if (columns.elementwise && !any_kept(c, std::min(kPanel, high - c))) continue;
        const int64_t i = blocks.count++, width = std::min(kPanel, round_up(high - c, 16));
        blocks.first[i] = c;
        blocks.width[i] = width;
        blocks.real[i] = std::min(width, columns.count - c);
      }
      if (blocks.count == 0) break;
      scores(blocks);
      weights(blocks, started);
      values(blocks, started);
      started = true;
    }
    if (!started) std::fill_n(mem.out, n * dv_pad, C(0));
    finish();
  }

  // The tile's queries: where they lie, if they lie well, else a copy.
  void take_queries() {
    q = mem.q;
    q_step = a.d;
    if constexpr (std::is_same_v<T, O>) {
      if (a.q.stride_d == 1 && m == count) {
        const int64_t next = row0 + a.chunks * a.rows;
        for (int64_t r = next; r < std::min(next + a.rows, s.tq); ++r)
          prefetch(at_head<T>(a.q, s, h, s.q0 + r), a.d);
        q = at_head<T>(a.q, s, h, s.q0 + row0);
        q_step = a.q.stride_t;
        return;
      }
    }
    for (int64_t r = 0; r < count; ++r)
      load_row(at_head<T>(a.q, s, h, s.q0 + row0 + r), a.q.stride_d, a.d, mem.q + r * a.d);
    std::fill(mem.q + count * a.d, mem.q + m * a.d, O(0));
  }

  // Products of queries and keys into mem.s.
  void scores(const Blocks& blocks) {
    for (int64_t i = 0; i < blocks.count; ++i) {
      const int64_t c = blocks.first[i], w = blocks.width[i];
      C* x = mem.s + i * kPanel;
      if (one_k) {
        if constexpr (std::is_same_v<O, C>)
          dots(q, one_k + c * a.k.stride_t, a.k.stride_t, a.d, blocks.real[i],
               columns.count - c - blocks.real[i], w, x);
      } else {
        gemm_tile(m, w, a.d, q, q_step, mem.k_panels + c * a.d, kPanel, x, a.tile, false);
      }
    }
  }

  // A.1 of row r: scale, bias, and -inf where it does not see.
  void mask(const Blocks& blocks, int64_t r, C* x) const {
    const C scale = static_cast<C>(a.scale);
    for (int64_t i = 0; i < blocks.count;) {
      const int64_t last = blocks.end_of_run(i) - 1, c = blocks.first[i];
      const int64_t before = (last - i) * kPanel, w = before + blocks.width[last];
      C* run = x + i * kPanel;
      i = last + 1;
      if (plain && !columns.elementwise && all_from <= c && c + w <= all_to) continue;
      if (!plain && !a.bias.data)
        for (int64_t j = 0; j < w; ++j) run[j] *= scale;
      if (a.bias.data || columns.elementwise)
        add_extras<T>(a, s, h, columns, row0 + r, c, before + blocks.real[last], scale, run);
      const int64_t begin = std::min(mem.begins[r] - c, w), end = std::min(mem.ends[r] - c, w);
      for (int64_t j = 0; j < begin; ++j) run[j] = kNothing;
      for (int64_t j = std::max<int64_t>(0, end); j < w; ++j) run[j] = kNothing;
    }
  }

  // A.1 to A.3 up to the division: mem.s becomes exp(x - maximum), mem.out follows a new maximum.
  void weights(const Blocks& blocks, bool started) {
    const int64_t last = blocks.count - 1, w = last * kPanel + blocks.width[last];
    for (int64_t r = 0; r < count; ++r) {
      C* x = mem.s + r * a.tile;
      mask(blocks, r, x);
      const C most = std::max(mem.tops[r], maximum(x, w));
      const C shift = most == kNothing ? C(0) : most;
      const C alpha = mem.tops[r] == most ? C(1) : exp2_fast((mem.tops[r] - shift) * log2_step);
      const bool drops = a.dropout.active();
      O* p = mem.p + r * a.tile;
      if constexpr (std::is_same_v<O, C>) p = x;
      const C sum =
          drops ? exponentials(x, w, shift, log2_step, x) : exponentials(x, w, shift, log2_step, p);
      mem.sums[r] = mem.sums[r] * alpha + sum;
      mem.tops[r] = most;
      if (started && alpha != C(1))
        for (int64_t e = 0; e < dv_pad; ++e) mem.out[r * dv_pad + e] *= alpha;
      if (!drops) continue;
      for (int64_t i = 0; i < blocks.count; ++i) {
        const int64_t n = blocks.real[i];
        factors_of(a, s, h, columns, row0 + r, blocks.first[i], n, mem.factors,
                   mem.factors + a.tile);
        for (int64_t j = 0; j < n; ++j)
          x[i * kPanel + j] = mem.factors[j] == C(0) ? C(0) : x[i * kPanel + j];
      }
      as_left(x, w, p);
    }
  }

  // A.4: mem.out += weights v, one product per run of neighbouring blocks.
  void values(const Blocks& blocks, bool accumulate) {
    const O* weights = mem.p;
    if constexpr (std::is_same_v<O, C>) {
      weights = mem.s;
      if (one_k) {
        if (!accumulate) std::fill_n(mem.out, dv_pad, C(0));
        if (columns.alive) return alive_values(blocks);
        return sum_values(blocks, mem.s, one_v, a.v.stride_t, a.dv, mem.out);
      }
    }
    for (int64_t i = 0; i < blocks.count;) {
      const int64_t end = blocks.end_of_run(i);
      const int64_t k = (end - 1 - i) * kPanel + blocks.width[end - 1];
      const int64_t whole = k / kPanel * kPanel;  // 64 k' and 16, 32, 48: few sizes, as above
      for (int64_t e = 0; e < a.dv; e += kPanel) {
        const int64_t n = std::min(kPanel, dv_pad - e);
        const int64_t ld = v_direct ? a.v.stride_t : n;
        const O *p = weights + i * kPanel, *v = v_direct ? v_direct + e : mem.v_panels + e * padded;
        v += blocks.first[i] * ld;
        if (whole) gemm_tile(m, n, whole, p, a.tile, v, ld, mem.out + e, dv_pad, accumulate);
        if (whole < k)
          gemm_tile(m, n, k - whole, p + whole, a.tile, v + whole * ld, ld, mem.out + e, dv_pad,
                    accumulate || whole);
      }
      accumulate = true;
      i = end;
    }
  }

  // The same of one query, without the values of dead keys, whose weight of 0 does not undo a NaN.
  void alive_values(const Blocks& blocks) {
    for (int64_t i = 0; i < blocks.count; ++i) {
      const uint8_t* alive = columns.alive + blocks.first[i];
      for (int64_t j = 0; j < blocks.real[i]; ++j) {
        if (!alive[j]) continue;
        Blocks run;
        run.count = 1;
        run.first[0] = blocks.first[i] + j;
        const C* weights = mem.s + i * kPanel + j;
        while (j < blocks.real[i] && alive[j]) ++j;
        run.real[0] = blocks.first[i] + j - run.first[0];
        sum_values(run, weights, one_v, a.v.stride_t, a.dv, mem.out);
      }
    }
  }

  void finish() {
    T* out = static_cast<T*>(const_cast<void*>(a.out.data)) + s.b * a.out.stride_b +
             h * a.out.stride_h + (s.q0 + row0) * a.out.stride_t;
    C* lse = static_cast<C*>(a.lse) + lse_at(a, s, h, row0);
    const C kept = a.dropout.active() ? static_cast<C>(a.dropout.scale) : C(1);
    for (int64_t r = 0; r < count; ++r) {
      C* row = mem.out + r * dv_pad;
      const bool sees = mem.sums[r] != C(0);
      // dropout's scale comes last: a largest weight of 1 stays one when it is rounded
      const C inverse = sees ? kept / mem.sums[r] : C(0);
      for (int64_t e = 0; e < a.dv; ++e) row[e] = sees ? row[e] * inverse : C(0);
      store_row<T>(row, a.dv, out + r * a.out.stride_t, a.out.stride_d);
      lse[r] = sees ? static_cast<C>(static_cast<double>(mem.tops[r]) * (plain ? a.scale : 1.0) +
                                     std::log(static_cast<double>(mem.sums[r])))
                    : kNothing;
    }
  }

  // Whether keep shows any pair of the tile's rows and columns c..c+n-1.
  bool any_kept(int64_t c, int64_t n) {
    alignas(64) uint8_t bytes[kPanel];
    for (int64_t r = 0; r < count; ++r) {
      gather(columns, at_head<uint8_t>(a.keep, s, h, row0 + r), a.keep.stride_d, c,
             std::min(n, columns.count - c), bytes);
      uint8_t any = 0;
      for (int64_t j = std::max<int64_t>(0, mem.begins[r] - c); j < std::min(n, mem.ends[r] - c);
           ++j)
        any |= bytes[j];
      if (any) return true;
    }
    return false;
  }

  const AttentionFwd& a;
  const bool plain;  // the scale waits until the maximum is subtracted
  const int64_t dv_pad;
  const C log2_step;
  const AttentionFwdScratch<C, O> mem;
  Sequence s{-1, 0, 0, 0, 0, 0, 0, 0};
  Columns columns;
  const T *one_k = nullptr, *one_v = nullptr;    // one query's keys and values, where they lie
  const O* v_direct = nullptr;                   // values that the tiles use where they lie
  const O* q = nullptr;                          // the tile's queries, q_step apart
  int64_t q_step = 0, all_from = 0, all_to = 0;  // columns from all_from to all_to: every row sees
  int64_t h = 0, packed = -1, padded = 0, row0 = 0, count = 0, m = 0;
};

}  // namespace

void attention_fwd(const AttentionFwd& args, DType dtype, std::atomic<int64_t>& next,
                   char* scratch) {
  for_operands(dtype, args.bf16_tiles, [&](auto zero, auto operand) {
    Worker<decltype(zero), decltype(operand)> worker(args, scratch);
    const int64_t units = args.batch * args.heads * args.chunks;
    for (int64_t u = next++; u < units; u = next++) worker.unit(u);
  });
}

}  // namespace CPU_CAPABILITY
}  // namespace tfm_kernels
