// Products of gradients, as the backwards of ffn and linear_cross_entropy form them: what they
// multiply by, laid out in panels, and the gradient of their input.
#pragma once
#include <algorithm>

#include "operand.h"
#include "prefetch.h"
#include "weights.h"

namespace tfm_kernels {

constexpr int64_t kGradientRowStep =
    128;  // rows of a left operand that stay in L2 while panels pass
constexpr int64_t kGradientSumStep = 512;  // features summed at a time in the input's gradient

// The leading dimension of so many features or columns in working memory: whole panels and a bit,
// because rows a power of two apart would thrash L1.
inline int64_t gradient_ld(int64_t n) { return round_up(n, kPanel) + 16; }

// Where gradients of features lie that one kernel leaves to the next: in slices of so many
// features, each (rows, ld).
struct Slices {
  void* data = nullptr;
  int64_t rows = 0, ld = 0, features = 1;

  // Of `all` features, as slice_product() takes them.
  Slices() = default;
  Slices(int64_t rows, int64_t all, int64_t most = kGradientSumStep)
      : rows(rows),
        ld(gradient_ld(std::min(most, all))),
        features(std::max<int64_t>(1, std::min(most, all))) {}

  int64_t elements(int64_t all) const { return ceil_div(all, features) * rows * ld; }

  // That of a row and feature; the next features of its slice follow, the next row is ld further.
  template <typename O>
  O* at(int64_t row, int64_t feature) const {
    return static_cast<O*>(data) + (feature / features * rows + row) * ld + feature % features;
  }
};

inline namespace CPU_CAPABILITY {
namespace {

// Columns of a panel here: where vectors hold 8 numbers, 32 (see panel_rows()).
constexpr int64_t kGradientPanel = Vec::size() < 16 ? kPanel / 2 : kPanel;

// Panels of columns of a right operand from src (rows, columns), the last filled up with zeros.
// Row r of panel p begins at dst + p * panel_size + r * kGradientPanel; bfloat16: an odd row is
// followed by zeros.
template <typename O, typename T>
void pack_panels(const T* src, int64_t src_ld, int64_t rows, int64_t columns, O* dst,
                 int64_t panel_size) {
  const int64_t whole = columns / kGradientPanel, rest = columns % kGradientPanel;
  for (int64_t r = 0; r < rows;
       r += kPair<O>, src += kPair<O> * src_ld, dst += kPair<O> * kGradientPanel) {
    for (int64_t i = 0; i < kPair<O>; ++i)
      if (r + i + kAhead < rows) prefetch(src + (i + kAhead) * src_ld, columns);
    const auto take = [&](int64_t c, int64_t n, O* out) {
      if constexpr (std::is_same_v<O, compute_t<T>>)
        widen(src + c, n, out);
      else
        pair_rows(src + c, r + 1 < rows ? src + src_ld + c : nullptr, n, out);
    };
    for (int64_t p = 0; p < whole; ++p)
      take(p * kGradientPanel, kGradientPanel, dst + p * panel_size);
    if (rest == 0) continue;
    O* last = dst + whole * panel_size;
    take(whole * kGradientPanel, rest, last);
    std::fill(last + kPair<O> * rest, last + kPair<O> * kGradientPanel, O(0));
  }
}

// Rows begin..end - 1 of a slice's part in the input's gradient: dx (rows, columns) = d (rows, n)
// weight (n, columns), or dx += where `accumulate`. d are n features from `feature` on, bfloat16
// with a zero after an odd number of them; weight and dx lie row-major from their first column on,
// dx from row 0 on. `panels` has room for n rows, made even, of whole panels.
template <typename T, typename O, typename C = compute_t<T>>
void slice_product(const Slices& d, int64_t feature, int64_t n, int64_t begin, int64_t end,
                   const T* weight, int64_t weight_ld, int64_t columns, C* dx, int64_t dx_ld,
                   bool accumulate, O* panels) {
  const int64_t k = round_up(n, kPair<O>);
  pack_panels(weight, weight_ld, n, columns, panels, k * kGradientPanel);
  for (int64_t r = begin; r < end; r += kGradientRowStep)
    for (int64_t c = 0; c < columns; c += kGradientPanel)
      product(std::min(kGradientRowStep, end - r), std::min(kGradientPanel, columns - c), k,
              d.at<O>(r, feature), d.ld, panels + c * k, kGradientPanel, dx + r * dx_ld + c, dx_ld,
              accumulate, kLongestGradientSum);
}

}  // namespace
}  // namespace CPU_CAPABILITY
}  // namespace tfm_kernels
