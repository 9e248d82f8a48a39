// ffn_bwd, CPU: the kernels for few rows. Implements FFN.5 to FFN.7 of tfm_kernels/ops/ffn.py,
// except db2, which is at::sum.
// Owns:    see ffn_bwd.h; no two tasks write the same element.
// Traffic: reads the weights once, where they lie, and writes their gradients once, which is what
// it costs; x, dy, dp and dx stay in cache. 8*M*E*F FLOPs, 12 with a gate.
// Limits:  at most kFfnBwdFewRows rows. Sums in float32, in float64 for float64.
// Source:  own work.
#include "ffn_bwd_hidden.h"
#include "prefetch.h"

namespace tfm_kernels {
inline namespace CPU_CAPABILITY {
namespace {

constexpr int64_t kTerms = 8;  // rows of weights at a time: their sums are formed apart

// out (rows, n) += x (rows, k) w (k, n), kCount rows of w. Those that follow are asked for where
// there are any.
template <int64_t kCount, typename T, typename C = compute_t<T>>
void add_terms(int64_t rows, int64_t n, const C* x, int64_t x_ld, const T* w, int64_t w_ld,
               int64_t following, C* out, int64_t ld) {
  using V = at::vec::Vectorized<C>;
  const auto step = [&](int64_t j, auto load, auto store) __attribute__((always_inline)) {
    V weights[kCount];
#pragma GCC unroll 8
    for (int64_t i = 0; i < kCount; ++i) weights[i] = load(w + i * w_ld + j);
    for (int64_t r = 0; r < rows; ++r) {
      const C* factors = x + r * x_ld;
      V sum = weights[0] * V(factors[0]);
#pragma GCC unroll 8
      for (int64_t i = 1; i < kCount; ++i) sum = at::vec::fmadd(weights[i], V(factors[i]), sum);
      store(sum, out + r * ld + j);
    }
  };
  int64_t j = 0;
  for (; j + V::size() <= n; j += V::size()) {
    for (int64_t i = 0; i < following; ++i) __builtin_prefetch(w + (kCount + i) * w_ld + j);
    step(
        j, [](const T* p) { return load_wide(p); },
        [](const V& sum, C* p) { (V::loadu(p) + sum).store(p); });
  }
  const int64_t rest = n - j;
  if (rest > 0)
    step(
        j, [&](const T* p) { return load_wide(p, rest); },
        [&](const V& sum, C* p) { (load_wide(p, rest) + sum).store(p, static_cast<int>(rest)); });
}

// out (rows, n) += x (rows, k) w (k, n).
template <typename T, typename C = compute_t<T>>
void add_product(int64_t rows, int64_t n, int64_t k, const C* x, int64_t x_ld, const T* w,
                 int64_t w_ld, C* out, int64_t ld) {
  int64_t i = 0;
  for (; i + kTerms <= k; i += kTerms)
    add_terms<kTerms>(rows, n, x + i, x_ld, w + i * w_ld, w_ld, std::min(kTerms, k - i - kTerms),
                      out, ld);
  for (; i < k; ++i) add_terms<1>(rows, n, x + i, x_ld, w + i * w_ld, w_ld, 0, out, ld);
}

// kCount rows of out (m, n) = left^T right, left (rows, m), right (rows, n).
template <int64_t kCount, typename T, typename C = compute_t<T>>
void outer_rows(int64_t rows, int64_t n, const C* left, int64_t left_ld, const C* right,
                int64_t right_ld, T* out, int64_t ld) {
  C factors[kFfnBwdFewRows * kCount];  // side by side: rows may lie a power of two apart
  for (int64_t r = 0; r < rows; ++r) std::copy_n(left + r * left_ld, kCount, factors + r * kCount);
  for_lanes<T>(n, [&]<typename V>(int64_t j) __attribute__((always_inline)) {
    V sum[kCount];
    const V first = load<V>(right + j);
#pragma GCC unroll 4
    for (int64_t i = 0; i < kCount; ++i) sum[i] = first * V(factors[i]);
    for (int64_t r = 1; r < rows; ++r) {
      const V factor = load<V>(right + r * right_ld + j);
#pragma GCC unroll 4
      for (int64_t i = 0; i < kCount; ++i) sum[i] = sum[i] + factor * V(factors[r * kCount + i]);
    }
#pragma GCC unroll 4
    for (int64_t i = 0; i < kCount; ++i) store(out + i * ld + j, sum[i]);
  });
}

// out (m, n) = left^T right, left (rows, m), right (rows, n).
template <typename T, typename C = compute_t<T>>
void outer_product(int64_t rows, int64_t m, int64_t n, const C* left, int64_t left_ld,
                   const C* right, int64_t right_ld, T* out, int64_t ld) {
  int64_t i = 0;
  for (; i + 4 <= m; i += 4)
    outer_rows<4>(rows, n, left + i, left_ld, right, right_ld, out + i * ld, ld);
  for (; i < m; ++i) outer_rows<1>(rows, n, left + i, left_ld, right, right_ld, out + i * ld, ld);
}

template <typename T, typename C = compute_t<T>>
void hidden_features(const FfnBwd& args, int64_t begin, int64_t end, C* scratch) {
  const int64_t rows = args.M, E = args.E, F = args.F, Eo = args.Eo, n = end - begin;
  const int64_t ld = gradient_ld(n);
  C *dh = scratch, *h = dh + rows * ld, *linear = args.gated ? h + rows * ld : nullptr;
  const C *x = static_cast<const C*>(args.x_rows), *dy = static_cast<const C*>(args.dy_rows);
  C* dp = args.dp.at<C>(0, begin);
  C* dg = args.gated ? args.dg.at<C>(0, begin) : nullptr;
  const auto at = [&](void* gradient, int64_t element) {
    return static_cast<T*>(gradient) + element;
  };

  std::fill_n(dh, rows * ld, C(0));
  if (args.needs_dh())
    add_product(rows, n, Eo, dy, args.dy_rows_ld, static_cast<const T*>(args.w2) + begin, F, dh,
                ld);
  alignas(64) C factors[kGradientPanel];
  std::fill(factors, factors + kGradientPanel, C(1));
  for_activation(args.activation, [&](auto act) {
    using Act = decltype(act);
    const auto step = args.gated ? differentiate<Act, true, C> : differentiate<Act, false, C>;
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t number = args.dropout_rows ? args.dropout_rows[r] : r;
      const T* stored = static_cast<const T*>(args.preact) + r * (args.gated ? 2 * F : F) + begin;
      for (int64_t j = 0; j < n; j += kGradientPanel) {
        const int64_t width = std::min(kGradientPanel, n - j), in_row = r * ld + j;
        if (args.dropout.active())
          dropout_factors(args.dropout.seed, number, begin + j, kGradientPanel, args.dropout.bound,
                          static_cast<C>(args.dropout.scale), factors);
        load_preact<T>(stored + j, nullptr, width, h + in_row);
        if (linear) load_preact<T>(stored + F + j, nullptr, width, linear + in_row);
        step(factors, dh + in_row, h + in_row, linear ? linear + in_row : nullptr,
             dp + r * args.dp.ld + j, dg ? dg + r * args.dp.ld + j : nullptr);
      }
    }
  });

  if (args.dw1)
    outer_product(rows, n, E, dp, args.dp.ld, x, args.x_rows_ld, at(args.dw1, begin * E), E);
  if (args.dgate)
    outer_product(rows, n, E, dg, args.dp.ld, x, args.x_rows_ld, at(args.dgate, begin * E), E);
  if (args.dw2) outer_product(rows, Eo, n, dy, args.dy_rows_ld, h, ld, at(args.dw2, begin), F);
  const auto biases = [&](const C* d, T* out) {
    for (int64_t j = 0; j < n; ++j) {
      double sum = 0.0;
      for (int64_t r = 0; r < rows; ++r) sum += d[r * args.dp.ld + j];
      out[j] = static_cast<T>(static_cast<C>(sum));
    }
  };
  if (args.db1) biases(dp, at(args.db1, begin));
  if (args.db1 && args.gate_bias) biases(dg, at(args.db1, F + begin));
}

template <typename T, typename C = compute_t<T>>
void input_columns(const FfnBwd& args, int64_t first, int64_t last, C* sum) {
  const int64_t rows = args.M, E = args.E, columns = last - first;
  const int64_t ld = gradient_ld(columns);
  std::fill_n(sum, rows * ld, C(0));
  const auto add = [&](const void* weight, const Slices& d) {
    add_product(rows, columns, args.F, d.at<C>(0, 0), d.ld, static_cast<const T*>(weight) + first,
                E, sum, ld);
  };
  add(args.w1, args.dp);
  if (args.gated) add(args.gate, args.dg);
  for (int64_t r = 0; r < rows; ++r)
    narrow(sum + r * ld, columns, static_cast<T*>(args.dx) + r * E + first);
}

}  // namespace

void ffn_bwd_few_rows_hidden(const FfnBwd& args, DType dtype, int64_t begin, int64_t end,
                             void* scratch) {
  for_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    hidden_features<T>(args, begin, end, static_cast<compute_t<T>*>(scratch));
  });
}

void ffn_bwd_few_rows_input(const FfnBwd& args, DType dtype, int64_t first, int64_t last,
                            void* scratch) {
  for_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    input_columns<T>(args, first, last, static_cast<compute_t<T>*>(scratch));
  });
}

}  // namespace CPU_CAPABILITY
}  // namespace tfm_kernels
