// Values of a head, packed for the products of the forward.
#pragma once
#include "attention_columns.h"
#include "operand.h"

namespace tfm_kernels {
inline namespace CPU_CAPABILITY {
namespace {

// A panel (columns, ld) of values that are `width` wide.
template <typename T, typename O>
void pack_values(const AttentionView& part, const Sequence& s, int64_t kv, const Columns& columns,
                 int64_t width, int64_t ld, O* panel) {
  const int64_t filled = round_up(columns.count, 16);
  if constexpr (!std::is_same_v<O, bf16_t>) {
    load_columns<T>(part, s, kv, columns, 0, columns.count, width, panel, ld);
    for (int64_t c = 0; c < columns.count && width < ld; ++c)
      std::fill(panel + c * ld + width, panel + (c + 1) * ld, O(0));
    std::fill(panel + columns.count * ld, panel + filled * ld, O(0));
  } else {
    alignas(64) O rows[kPanel * kPanel];
    std::fill_n(rows, kPanel * kPanel, O(0));
    for (int64_t c = 0; c < filled; c += kPanel) {
      const int64_t n = std::min(kPanel, columns.count - c), m = std::min(kPanel, filled - c);
      load_columns<T>(part, s, kv, columns, c, n, width, rows, ld);
      std::fill(rows + n * ld, rows + m * ld, O(0));
      for (int64_t i = 0; i < m; i += 2)
        pair_rows(rows + i * ld, rows + (i + 1) * ld, ld, panel + (c + i) * ld);
    }
  }
}

}  // namespace
}  // namespace CPU_CAPABILITY
}  // namespace tfm_kernels
