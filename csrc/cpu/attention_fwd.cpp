// attention_fwd, CPU. Implements A.1 to A.4 of tfm_kernels/ops/attention.py.
// Owns:    one unit = some query tiles of one head; a worker takes units until none is left, and
//          keeps the head's keys (transposed) and values packed in panels of 64 columns while it
//          stays with it. A tile of up to kRows queries meets kTile keys at a time: scores,
//          running maximum and sum, and the output rows stay in L2.
// Traffic: reads q once, k and v once per head and worker; writes out and lse once. 4 Tq Tk D
//          operations per head, fewer where keys are hidden: keys that no row sees are not packed,
//          blocks of 64 keys that a tile does not see are skipped.
// Limits:  none; float64 computes in float64 by plain loops, everything else in float32.
// Source:  own work, after Dao 2023, arXiv:2307.08691, algorithm 1.
#include <atomic>

#include "attention.h"

namespace tfm_kernels {

struct AttentionFwd : AttentionArgs {
  AttentionView out;
  void* lse;       // (B, H, Tq) or (H, total_q), in the compute type
  int64_t rows;    // queries per tile, at most kRows
  int64_t chunks;  // units per head
  int64_t tile;    // keys per tile, a multiple of kPanel
};

TFM_DECLARE_KERNEL(void attention_fwd(const AttentionFwd& args, DType dtype,
                                      std::atomic<int64_t>& next, char* scratch))

// Elements of the compute type that a worker needs, then bytes for the columns behind them.
struct AttentionFwdScratch {
  int64_t k, v, q, s, out, statistics, factors, elements, bytes;

  AttentionFwdScratch(const AttentionFwd& a, int64_t element_size) {
    const int64_t keys = (a.keys + 63) / 64 * 64, dv = (a.dv + 15) / 16 * 16;
    int64_t at = 0;
    auto take = [&](int64_t n) { return std::exchange(at, at + (n + 15) / 16 * 16); };
    k = take(keys * a.d);
    v = take(keys * dv);
    q = take(std::max<int64_t>(a.rows, 64) * a.d);
    s = take(a.rows * a.tile);
    out = take(a.rows * dv);
    statistics = take(a.rows * 2);
    factors = take(a.dropout.active() ? a.tile + keys : 0);
    elements = at;
    bytes = at * element_size + 2 * a.rows * 8 + (keys + 1) * 9 + 64;
  }
};

inline namespace CPU_CAPABILITY {
namespace {

template <typename T>
class Worker {
  using C = compute_t<T>;
  static constexpr double kLog2E = 1.4426950408889634;
  static constexpr C kNothing = -std::numeric_limits<C>::infinity();
  using V = at::vec::Vectorized<C>;

 public:
  Worker(const AttentionFwd& args, char* scratch)
      : a(args), plain(!args.bias.data && args.scale > 0), dv_pad(round_up(args.dv, 16)) {
    const AttentionFwdScratch layout(args, sizeof(C));
    C* base = reinterpret_cast<C*>(scratch);
    k_panels = base + layout.k;
    v_panels = base + layout.v;
    q_rows = base + layout.q;
    s_rows = base + layout.s;
    out_rows = base + layout.out;
    sums = base + layout.statistics;
    tops = sums + a.rows;
    factors = base + layout.factors;
    begins = reinterpret_cast<int64_t*>(base + layout.elements);
    ends = begins + a.rows;
    const int64_t keys = round_up(a.keys, kPanel);
    columns_scratch.index = reinterpret_cast<int32_t*>(ends + a.rows);
    columns_scratch.rank = columns_scratch.index + keys;
    columns_scratch.alive = reinterpret_cast<uint8_t*>(columns_scratch.rank + keys + 1);
    log2_step = static_cast<C>((plain ? a.scale : 1.0) * kLog2E);
  }

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
    columns = find_columns<T>(a, s, h, columns_scratch);
    padded = round_up(columns.count, kPanel);
    const bool direct = direct_rows(a.k);
    k_direct = v_direct = nullptr;
    if constexpr (std::is_same_v<T, C>) {
      if (a.queries == 1 && direct && direct_rows(a.v)) {
        k_direct = at_head<T>(a.k, s, kv, s.k0 + columns.first);
        v_direct = at_head<T>(a.v, s, kv, s.k0 + columns.first);
        return;
      }
    }
    for (int64_t c = 0; c < columns.count; c += kPanel) {
      const int64_t n = std::min(kPanel, columns.count - c);
      C* panel = k_panels + c * a.d;  // (D, kPanel)
      if (direct) {
        if constexpr (std::is_same_v<T, C>)
          transpose(n, a.d, at_head<T>(a.k, s, kv, s.k0 + columns.key(c)), a.k.stride_t, panel,
                    kPanel);
      } else {
        load_columns<T>(a.k, s, kv, columns, c, n, a.d, q_rows, a.d);
        transpose(n, a.d, q_rows, a.d, panel, kPanel);
      }
      for (int64_t d = 0; d < a.d && n < kPanel; ++d)
        std::fill(panel + d * kPanel + n, panel + d * kPanel + round_up(n, 16), C(0));
    }
    if constexpr (std::is_same_v<T, C>) {
      // for few tiles of queries a copy, which lies better in the cache, does not pay
      if (direct_rows(a.v) && a.dv % 16 == 0 && columns.count % 16 == 0 && s.tq <= 4 * a.rows) {
        v_direct = at_head<T>(a.v, s, kv, s.k0 + columns.first);
        return;
      }
    }
    for (int64_t e = 0; e < a.dv; e += kPanel) {
      const int64_t width = std::min(kPanel, a.dv - e), ld = std::min(kPanel, dv_pad - e);
      C* panel = v_panels + e * padded;  // (columns, ld)
      AttentionView part = a.v;
      part.data = static_cast<const T*>(a.v.data) + e * a.v.stride_d;
      load_columns<T>(part, s, kv, columns, 0, columns.count, width, panel, ld);
      for (int64_t c = 0; c < columns.count && width < ld; ++c)
        std::fill(panel + c * ld + width, panel + (c + 1) * ld, C(0));
      std::fill(panel + columns.count * ld, panel + round_up(columns.count, 16) * ld, C(0));
    }
  }

  // Whether the columns' rows of keys or values can be used where they lie.
  bool direct_rows(const AttentionView& view) const {
    return std::is_same_v<T, C> && view.stride_d == 1 && !columns.index && !columns.alive;
  }

  // Rows first..first+n-1 against all their keys.
  void tile(int64_t first, int64_t n) {
    row0 = first;
    count = n;
    int64_t low = columns.count, high = 0;
    all_from = 0, all_to = columns.count;
    for (int64_t r = 0; r < n; ++r) {
      begins[r] = columns.from(first + r + s.low);
      ends[r] = std::max(begins[r], columns.from(first + r + s.high + 1));
      if (row_hidden(a, s, h, first + r)) ends[r] = begins[r];
      all_from = std::max(all_from, begins[r]);
      all_to = std::min(all_to, ends[r]);
      if (begins[r] == ends[r]) continue;
      low = std::min(low, begins[r]);
      high = std::max(high, ends[r]);
    }
    m = padded_rows(n);
    take_queries();
    std::fill_n(tops, n, kNothing);
    std::fill_n(sums, n, C(0));

    bool started = false;
    for (int64_t c = low / kPanel * kPanel; c < high;) {
      int64_t blocks[kMostBlocks], used = 0;
      for (; c < high && used < a.tile / kPanel; c += kPanel)
        if (!columns.elementwise || any_kept(c, std::min(kPanel, high - c))) blocks[used++] = c;
      if (used == 0) break;
      scores(blocks, used, high);
      weights(blocks, used, high, started);
      values(blocks, used, high, started);
      started = true;
    }
    if (!started) std::fill_n(out_rows, n * dv_pad, C(0));
    finish();
  }

  // The tile's queries: where they lie, if they lie well, else a copy.
  void take_queries() {
    q = q_rows;
    q_step = a.d;
    if constexpr (std::is_same_v<T, C>) {
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
      load_row(at_head<T>(a.q, s, h, s.q0 + row0 + r), a.q.stride_d, a.d, q_rows + r * a.d);
    std::fill(q_rows + count * a.d, q_rows + m * a.d, C(0));
  }

  // Columns of block c that take part, a multiple of 16.
  static int64_t width(int64_t c, int64_t high) { return std::min(kPanel, round_up(high - c, 16)); }

  // Rows of a matrix tile: few sizes, because the matrix library compiles code for each.
  static int64_t padded_rows(int64_t n) {
    return n <= 2 ? n : n <= 4 ? 4 : n <= 64 ? round_up(n, 8) : round_up(n, 32);
  }

  // A.1 into s_rows, masked.
  void scores(const int64_t* blocks, int64_t used, int64_t high) {
    for (int64_t i = 0; i < used; ++i) {
      const int64_t c = blocks[i], w = width(c, high), real = std::min(kPanel, columns.count - c);
      C* x = s_rows + i * kPanel;
      if (k_direct)
        dots(c, std::min(w, real), w, x);
      else
        gemm_tile(m, w, a.d, q, q_step, k_panels + c * a.d, kPanel, x, a.tile, false);
      if (plain && !columns.elementwise && all_from <= c && c + w <= all_to) continue;
      for (int64_t r = 0; r < count; ++r, x += a.tile) {
        if (!plain)
          for (int64_t j = 0; j < w; ++j) x[j] *= static_cast<C>(a.scale);
        if (a.bias.data || columns.elementwise)
          add_extras<T>(a, s, h, columns, row0 + r, c, std::min(w, real), x);
        const int64_t begin = std::min(begins[r] - c, w), end = std::min(ends[r] - c, w);
        for (int64_t j = 0; j < begin; ++j) x[j] = kNothing;
        for (int64_t j = std::max<int64_t>(0, end); j < w; ++j) x[j] = kNothing;
      }
    }
  }

  // A.2 and A.3 up to the division: s_rows becomes exp(x - maximum), out_rows follows a new
  // maximum.
  void weights(const int64_t* blocks, int64_t used, int64_t high, bool started) {
    const int64_t w = (used - 1) * kPanel + width(blocks[used - 1], high);
    for (int64_t r = 0; r < count; ++r) {
      C* x = s_rows + r * a.tile;
      const C most = std::max(tops[r], maximum(x, w));
      const C shift = most == kNothing ? C(0) : most;
      const C alpha = tops[r] == most ? C(1) : exp2_fast((tops[r] - shift) * log2_step);
      sums[r] = sums[r] * alpha + exponentials(x, w, shift);
      tops[r] = most;
      if (started && alpha != C(1))
        for (int64_t e = 0; e < dv_pad; ++e) out_rows[r * dv_pad + e] *= alpha;
      if (a.dropout.active())
        for (int64_t i = 0; i < used; ++i) {
          const int64_t n = std::min(width(blocks[i], high), columns.count - blocks[i]);
          factors_of(a, s, h, columns, row0 + r, blocks[i], n, factors, factors + a.tile);
          for (int64_t j = 0; j < n; ++j) x[i * kPanel + j] *= factors[j];
        }
    }
  }

  // The largest of w numbers, w a multiple of 16, but for NaN, which the sum will show.
  static C maximum(const C* x, int64_t w) {
    V m0(kNothing), m1 = m0;
    for (int64_t j = 0; j < w; j += 16)
      for (int l = 0; l < 16; l += 2 * V::size()) {
        m0 = at::vec::clamp_min(V::loadu(x + j + l), m0);
        if constexpr (V::size() < 16) m1 = at::vec::clamp_min(V::loadu(x + j + l + V::size()), m1);
      }
    return at::vec::vec_reduce_all<C>(
        [](const V& p, const V& q) { return at::vec::clamp_min(p, q); },
        at::vec::clamp_min(m0, m1));
  }

  // x = 2^((x - shift) log2_step) over w numbers; their sum. The difference comes first, so that
  // large scores lose nothing.
  C exponentials(C* x, int64_t w, C shift) const {
    const V shift_v(shift), step_v(log2_step);
    auto one = [&](int64_t j) {
      const V p = exp2_fast((V::loadu(x + j) - shift_v) * step_v);
      p.store(x + j);
      return p;
    };
    V s0(C(0)), s1 = s0;
    int64_t j = 0;
    for (; j + 2 * V::size() <= w; j += 2 * V::size()) {
      s0 = s0 + one(j);
      s1 = s1 + one(j + V::size());
    }
    if (j < w) s0 = s0 + one(j);
    return at::vec::vec_reduce_all<C>([](const V& p, const V& q) { return p + q; }, s0 + s1);
  }

  // A.1 for one query: reading the keys is all the work, so they are neither packed nor turned.
  // A vector of partial sums a key; those of V::size() keys are turned and added at once.
  void dots(int64_t c, int64_t n, int64_t w, C* x) const {
    constexpr int64_t kLanes = V::size();
    alignas(64) C partial[kLanes * kLanes], turned[kLanes * kLanes];
    for (int64_t j = 0; j < w; j += kLanes) {
      const int64_t keys = std::clamp<int64_t>(n - j, 0, kLanes);
      std::fill(partial + keys * kLanes, partial + kLanes * kLanes, C(0));
      for (int64_t l = 0; l < keys; ++l) {
        const C* key = k_direct + (c + j + l) * a.k.stride_t;
        V sum(C(0));
        int64_t e = 0;
        for (; e + kLanes <= a.d; e += kLanes)
          sum = at::vec::fmadd(V::loadu(q + e), V::loadu(key + e), sum);
        if (e < a.d) {
          const auto rest = static_cast<int>(a.d - e);
          sum = at::vec::fmadd(V::loadu(q + e, rest), V::loadu(key + e, rest), sum);
        }
        sum.store(partial + l * kLanes);
      }
      transpose(kLanes, kLanes, partial, kLanes, turned, kLanes);
      V total = V::loadu(turned);
      for (int64_t l = 1; l < kLanes; ++l) total = total + V::loadu(turned + l * kLanes);
      total.store(x + j);
    }
  }

  // A.4 for one query: out_rows += s_rows v, up to four vectors of it in registers.
  void sum_values(const int64_t* blocks, int64_t used, int64_t high) {
    constexpr int64_t kLanes = V::size();
    int64_t e = 0;
    for (; e + 4 * kLanes <= a.dv; e += 4 * kLanes) sum_strip<4>(blocks, used, high, e, kLanes);
    for (; e < a.dv; e += kLanes)
      sum_strip<1>(blocks, used, high, e, std::min<int64_t>(kLanes, a.dv - e));
  }

  template <int kVectors>
  void sum_strip(const int64_t* blocks, int64_t used, int64_t high, int64_t e,
                 int64_t last) const {  // elements of the last vector
    C* out = out_rows + e;
    V sum[kVectors];
    for (int i = 0; i < kVectors; ++i) sum[i] = V::loadu(out + i * V::size());
    for (int64_t b = 0; b < used; ++b) {
      const int64_t c = blocks[b], n = std::min(width(c, high), columns.count - c);
      const C* value = v_direct + c * a.v.stride_t + e;
      for (int64_t j = 0; j < n; ++j, value += a.v.stride_t) {
        const V p(s_rows[b * kPanel + j]);
        for (int i = 0; i < kVectors - 1; ++i)
          sum[i] = at::vec::fmadd(p, V::loadu(value + i * V::size()), sum[i]);
        const C* end = value + (kVectors - 1) * V::size();
        sum[kVectors - 1] = at::vec::fmadd(
            p, last == V::size() ? V::loadu(end) : V::loadu(end, static_cast<int>(last)),
            sum[kVectors - 1]);
      }
    }
    for (int i = 0; i < kVectors; ++i) sum[i].store(out + i * V::size());
  }

  // A.4: out_rows += s_rows v, one product per run of neighbouring blocks.
  void values(const int64_t* blocks, int64_t used, int64_t high, bool accumulate) {
    if (k_direct) {
      if (!accumulate) std::fill_n(out_rows, dv_pad, C(0));
      return sum_values(blocks, used, high);
    }
    for (int64_t i = 0; i < used;) {
      int64_t end = i + 1;
      while (end < used && blocks[end] == blocks[end - 1] + kPanel) ++end;
      const int64_t k = (end - 1 - i) * kPanel + width(blocks[end - 1], high);
      const int64_t whole = k / kPanel * kPanel;  // 64 k' and 16, 32, 48: few sizes, as above
      for (int64_t e = 0; e < a.dv; e += kPanel) {
        const int64_t n = std::min(kPanel, dv_pad - e);
        const int64_t ld = v_direct ? a.v.stride_t : n;
        const C *p = s_rows + i * kPanel, *v = v_direct ? v_direct + e : v_panels + e * padded;
        v += blocks[i] * ld;
        if (whole) gemm_tile(m, n, whole, p, a.tile, v, ld, out_rows + e, dv_pad, accumulate);
        if (whole < k)
          gemm_tile(m, n, k - whole, p + whole, a.tile, v + whole * ld, ld, out_rows + e, dv_pad,
                    accumulate || whole);
      }
      accumulate = true;
      i = end;
    }
  }

  void finish() {
    T* out = static_cast<T*>(const_cast<void*>(a.out.data)) + s.b * a.out.stride_b +
             h * a.out.stride_h + (s.q0 + row0) * a.out.stride_t;
    C* lse = static_cast<C*>(a.lse) + s.b * a.lse_stride_b + h * a.lse_stride_h + s.q0 + row0;
    for (int64_t r = 0; r < count; ++r) {
      C* row = out_rows + r * dv_pad;
      const bool sees = sums[r] != C(0);
      const C inverse = sees ? C(1) / sums[r] : C(0);
      for (int64_t e = 0; e < a.dv; ++e) row[e] = sees ? row[e] * inverse : C(0);
      store_row<T>(row, a.dv, out + r * a.out.stride_t, a.out.stride_d);
      lse[r] = sees ? static_cast<C>(static_cast<double>(tops[r]) * (plain ? a.scale : 1.0) +
                                     std::log(static_cast<double>(sums[r])))
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
      for (int64_t j = std::max<int64_t>(0, begins[r] - c); j < std::min(n, ends[r] - c); ++j)
        any |= bytes[j];
      if (any) return true;
    }
    return false;
  }

  static constexpr int64_t kMostBlocks = 16;
  const AttentionFwd& a;
  const bool plain;  // the scale waits until the maximum is subtracted
  const int64_t dv_pad;
  C log2_step;
  C *k_panels, *v_panels, *q_rows, *s_rows, *out_rows, *factors;
  C *sums, *tops;          // (rows) sum of the weights so far; largest score so far
  int64_t *begins, *ends;  // (rows) the columns that a row may see
  ColumnScratch columns_scratch;
  Sequence s{-1, 0, 0, 0, 0, 0, 0, 0};
  Columns columns;
  const C *k_direct = nullptr, *v_direct = nullptr;  // keys and values that are used where they lie
  const C* q = nullptr;                              // the tile's queries, q_step apart
  int64_t q_step = 0, all_from = 0, all_to = 0;  // columns from all_from to all_to: every row sees
  int64_t h = 0, packed = -1, padded = 0, row0 = 0, count = 0, m = 0;
};

}  // namespace

void attention_fwd(const AttentionFwd& args, DType dtype, std::atomic<int64_t>& next,
                   char* scratch) {
  for_dtype(dtype, [&](auto zero) {
    Worker<decltype(zero)> worker(args, scratch);
    const int64_t units = args.batch * args.heads * args.chunks;
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

// Queries and keys per tile, and units per head, by shape alone.
void pick_config(AttentionFwd& a, int64_t threads) {
  a.rows = a.queries >= 768 ? 128 : std::clamp<int64_t>((a.queries + 7) / 8 * 8, 8, 64);
  a.tile = std::clamp<int64_t>((a.keys + 63) / 64 * 64, 64, 512);
  const int64_t heads = std::max<int64_t>(1, a.batch * a.heads);
  const int64_t tiles = std::max<int64_t>(1, (a.queries + a.rows - 1) / a.rows);
  a.chunks = heads >= 4 * threads ? 1 : std::min(tiles, (4 * threads + heads - 1) / heads);
}

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
  const int64_t bytes = AttentionFwdScratch(a, lse.element_size()).bytes;
  call.run(threads, bytes, [&](std::atomic<int64_t>& next, char* scratch) {
    TFM_KERNEL(attention_fwd)(a, call.dtype, next, scratch);
  });
  return {out, lse};
}

TORCH_LIBRARY_IMPL(tfm_kernels, CPU, m) { m.impl("attention_fwd_cpu", &attention_fwd_cpu); }

}  // namespace
}  // namespace tfm_kernels
#endif
