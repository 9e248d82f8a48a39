// The columns of a head's matrices: which keys and rows meet, and what every pair of them has
// beside its score (bias, keep, dropout's factor).
#pragma once
#include <algorithm>
#include <cstring>
#include <limits>

#include "attention.h"
#include "prefetch.h"

namespace tfm_kernels {
inline namespace CPU_CAPABILITY {
namespace {

// The keys of one head that some row sees, in order: the columns of its matrices.
struct Columns {
  int64_t first = 0, range = 0;    // the keys that band and lengths leave
  int64_t count = 0;               // columns
  const int32_t* index = nullptr;  // column -> key where keys were left out, else first + column
  const int32_t* rank = nullptr;   // key - first -> column, (range + 1), beside index
  const uint8_t* alive = nullptr;  // by key - first, where dead keys stay in, hidden and as zeros
  bool elementwise = false;        // keep must be asked for single pairs

  int64_t key(int64_t c) const { return index ? index[c] : first + c; }
  // The first column whose key is >= j.
  int64_t from(int64_t j) const {
    const int64_t offset = std::clamp<int64_t>(j - first, 0, range);
    return rank ? rank[offset] : offset;
  }
};

struct ColumnScratch {
  uint8_t* alive = nullptr;                   // (Tk)
  int32_t *index = nullptr, *rank = nullptr;  // (Tk), (Tk + 1)

  ColumnScratch() = default;
  ColumnScratch(Scratch& scratch, int64_t keys)
      : alive(scratch.take<uint8_t>(keys)),
        index(scratch.take<int32_t>(keys)),
        rank(scratch.take<int32_t>(keys + 1)) {}
};

// alive[j] |= keep[j], where there is a keep, and bias[j] is not -inf; n of them.
template <typename S>
void mark_alive(const uint8_t* keep, int64_t keep_step, const S* bias, int64_t bias_step, int64_t n,
                uint8_t* alive) {
  using Bits = std::conditional_t<sizeof(S) == 8, uint64_t,
                                  std::conditional_t<sizeof(S) == 4, uint32_t, uint16_t>>;
  constexpr Bits kHidden = std::is_same_v<S, double>  ? static_cast<Bits>(0xFFF0000000000000u)
                           : std::is_same_v<S, float> ? static_cast<Bits>(0xFF800000u)
                           : std::is_same_v<S, f16_t> ? static_cast<Bits>(0xFC00u)
                                                      : static_cast<Bits>(0xFF80u);
  const Bits* bits = reinterpret_cast<const Bits*>(bias);
  if (keep)
    for (int64_t j = 0; j < n; ++j)
      alive[j] |=
          static_cast<uint8_t>((keep[j * keep_step] != 0) & (bits[j * bias_step] != kHidden));
  else if (bias_step == 1)
    for (int64_t j = 0; j < n; ++j) alive[j] |= static_cast<uint8_t>(bits[j] != kHidden);
  else
    for (int64_t j = 0; j < n; ++j)
      alive[j] |= static_cast<uint8_t>(bits[j * bias_step] != kHidden);
}

// Marks by alive[j - first] the keys that some row sees, of n from `first` on: row by row from the
// last one, which under a causal mask sees all, until none is left to mark.
template <typename T>
void mark_seen(const AttentionArgs& a, const Sequence& s, int64_t h, int64_t first, int64_t n,
               uint8_t* alive) {
  std::memset(alive, 0, n);
  const bool alike = (!a.keep.data || a.keep.stride_t == 0) &&
                     (!a.bias.data || a.bias.stride_t == 0);  // then the band has said its part
  int64_t low = 0, high = n;                                  // where keys are left to mark
  for (int64_t i = alike ? 0 : s.tq - 1; i >= 0; --i) {
    int64_t begin = first + low, end = first + high;
    if (!alike) {
      begin = std::max(begin, i + s.low);
      end = std::min(end, i + s.high + 1);
    }
    if (begin >= end) continue;
    const auto mark = [&]<typename S>(const S* bias) {
      const uint8_t* keep = nullptr;
      if (a.keep.data) keep = at_head<uint8_t>(a.keep, s, h, i) + begin * a.keep.stride_d;
      mark_alive(keep, a.keep.stride_d, bias + begin * a.bias.stride_d, a.bias.stride_d,
                 end - begin, alive + begin - first);
    };
    if (!a.bias.data) {
      const uint8_t* keep = at_head<uint8_t>(a.keep, s, h, i);
      if (a.keep.stride_d == 1)
        for (int64_t j = begin; j < end; ++j) alive[j - first] |= keep[j];
      else
        for (int64_t j = begin; j < end; ++j) alive[j - first] |= keep[j * a.keep.stride_d];
    } else if (a.bias_is_float) {
      mark(at_head<float>(a.bias, s, h, i));
    } else {
      mark(at_head<T>(a.bias, s, h, i));
    }
    while (low < high && alive[low]) ++low;
    while (low < high && alive[high - 1]) --high;
    if (low == high) return;
  }
}

// Finds the columns of head h. Keys that no row may see, by keep or by a bias of -inf, are left
// out, or marked where leaving them out would cost more than it saves: what they hold, NaN perhaps,
// can then change no bit of a result.
template <typename T>
Columns find_columns(const AttentionArgs& a, const Sequence& s, int64_t h, ColumnScratch scratch) {
  Columns c;
  c.first = std::clamp<int64_t>(s.low, 0, s.tk);
  c.range = std::max<int64_t>(0, std::min(s.live, s.tq + s.high) - c.first);
  if (s.tq == 0 || s.low > s.high) c.range = 0;
  c.count = c.range;
  if (c.range == 0 || (!a.keep.data && !a.bias.data)) return c;

  uint8_t* alive = scratch.alive;
  mark_seen<T>(a, s, h, c.first, c.range, alive);
  int32_t count = 0;
  for (int64_t j = 0; j < c.range; ++j) {
    scratch.rank[j] = count;
    if (alive[j]) scratch.index[count++] = static_cast<int32_t>(c.first + j);
  }
  scratch.rank[c.range] = count;
  c.elementwise = a.keep.data && a.keep.stride_t != 0 && a.keep.stride_d != 0;
  if (count > 0 && scratch.index[count - 1] - scratch.index[0] + 1 == count) {  // one run of keys
    c.first = scratch.index[0];
    c.range = c.count = count;
  }
  if (count == c.range) return c;
  const bool gathers = a.bias.data || a.dropout.active() || c.elementwise;
  const bool stays = a.bias.data && a.queries == 1;  // keys are read where they lie
  if (!gathers || (!stays && count <= c.range * 3 / 4)) {
    c.count = count;
    c.index = scratch.index;
    c.rank = scratch.rank;
  } else {
    c.alive = alive;
    c.elementwise = a.keep.data != nullptr;
  }
  return c;
}

// Columns begin..begin+n-1 of a row of something per pair (bias, keep) as contiguous C.
template <typename S, typename C>
void gather(const Columns& columns, const S* row, int64_t stride, int64_t begin, int64_t n,
            C* out) {
  if (columns.index)
    for (int64_t j = 0; j < n; ++j) out[j] = static_cast<C>(row[columns.index[begin + j] * stride]);
  else
    load_row(row + (columns.first + begin) * stride, stride, n, out);
}

// x[j] = scale x[j] + bias[j], and -inf where the bias is.
template <typename S, typename C = compute_t<S>>
void add_bias(const S* bias, int64_t n, C scale, C* x) {
  using V = at::vec::Vectorized<C>;
  const V scales(scale), hidden(-std::numeric_limits<C>::infinity());
  const auto add = [&](V p, V b) {
    return V::blendv(at::vec::fmadd(p, scales, b), hidden, b == hidden);
  };
  int64_t j = 0;
  for (; j + V::size() <= n; j += V::size()) add(V::loadu(x + j), load_wide(bias + j)).store(x + j);
  if (j == n) return;
  const auto rest = static_cast<int>(n - j);
  add(V::loadu(x + j, rest), load_wide(bias + j, rest)).store(x + j, rest);
}

// x[j] = scale x[j] + bias over columns begin..begin+n-1 of row i where there is a bias, and -inf
// at pairs that bias or keep hide.
template <typename T, typename C = compute_t<T>>
void add_extras(const AttentionArgs& a, const Sequence& s, int64_t h, const Columns& columns,
                int64_t i, int64_t begin, int64_t n, C scale, C* x) {
  constexpr C kHidden = -std::numeric_limits<C>::infinity();
  alignas(64) C bias[kPanel];
  alignas(64) uint8_t keep[kPanel];
  for (int64_t done = 0; done < n; done += kPanel, x += kPanel, begin += kPanel) {
    const int64_t m = std::min(kPanel, n - done);
    if (a.bias.data) {
      auto take = [&]<typename S>(const S* row) {
        if constexpr (std::is_same_v<compute_t<S>, C>) {
          if (a.bias.stride_d == 1 && !columns.index) {
            row += columns.first + begin;
            if (a.bias.stride_t && i + kAhead < s.tq) prefetch(row + kAhead * a.bias.stride_t, m);
            return add_bias(row, m, scale, x);
          }
        }
        gather(columns, row, a.bias.stride_d, begin, m, bias);
        add_bias(bias, m, scale, x);
      };
      if (a.bias_is_float)
        take(at_head<float>(a.bias, s, h, i));
      else
        take(at_head<T>(a.bias, s, h, i));
    }
    if (columns.elementwise) {
      gather(columns, at_head<uint8_t>(a.keep, s, h, i), a.keep.stride_d, begin, m, keep);
      for (int64_t j = 0; j < m; ++j) x[j] = keep[j] ? x[j] : kHidden;
    }
  }
}

// Dropout's factors for columns begin..begin+n-1 of row i.
template <typename C>
void factors_of(const AttentionArgs& a, const Sequence& s, int64_t h, const Columns& columns,
                int64_t i, int64_t begin, int64_t n, C* factors, C* scratch) {
  const uint64_t row = static_cast<uint64_t>((s.b * a.heads + h) * a.row_step + i);
  const C scale = static_cast<C>(a.dropout.scale);
  if (!columns.index) {
    dropout_factors(a.dropout.seed, row, columns.first + begin, n, a.dropout.bound, scale, factors);
  } else if (n > 0) {
    const int64_t first = columns.index[begin], last = columns.index[begin + n - 1];
    dropout_factors(a.dropout.seed, row, first, last - first + 1, a.dropout.bound, scale, scratch);
    for (int64_t j = 0; j < n; ++j) factors[j] = scratch[columns.index[begin + j] - first];
  }
}

// Rows begin..begin+n-1 of the columns' keys or values as (n, width) with leading dimension ld,
// dead ones as zeros.
template <typename T, typename O>
void load_columns(const AttentionView& view, const Sequence& s, int64_t kv, const Columns& columns,
                  int64_t begin, int64_t n, int64_t width, O* out, int64_t ld) {
  auto at = [&](int64_t c) { return at_head<T>(view, s, kv, s.k0 + columns.key(c)); };
  for (int64_t c = begin; c < begin + n; ++c, out += ld) {
    if (c + kAhead < begin + n) prefetch(at(c + kAhead), width);
    if (columns.alive && !columns.alive[c])
      std::fill_n(out, width, O(0));
    else
      load_row(at(c), view.stride_d, width, out);
  }
}

}  // namespace
}  // namespace CPU_CAPABILITY
}  // namespace tfm_kernels
