// ffn_bwd, CPU: the kernels. Implements FFN.5 to FFN.7 of tfm_kernels/ops/ffn.py, except db2.
// Owns:    see ffn_bwd.h.
// Traffic: a block reads x, dy, preact and the weights once and dw1, dw2 twice; dp is written and
//          read in L3.
//          8*M*E*F FLOPs, 12 with a gate, 2 or 4 more where preact is computed again.
// Limits:  none; float64 computes in float64 by plain loops, everything else in float32, with
//          bfloat16 products where the CPU has them.
// Source:  own work.
#include <utility>

#include "ffn_bwd_hidden.h"
#include "gradient.h"

namespace tfm_kernels {
inline namespace CPU_CAPABILITY {
namespace {

template <typename T, typename O>
void prepare(const FfnBwd& args, int64_t row, int64_t begin, int64_t end) {
  const int64_t E = args.E, Eo = args.Eo, rows = end - begin;
  const T* x = static_cast<const T*>(args.x) + (row + begin) * args.x_stride_m;
  const T* dy = static_cast<const T*>(args.dy) + (row + begin) * args.dy_stride_m;
  if (args.dw1 || args.dgate)
    pack_panels(x, args.x_stride_m, rows, E,
                static_cast<O*>(args.x_panels) + begin * kGradientPanel,
                args.block * kGradientPanel);
  if (args.dw2)
    turn_left(dy, args.dy_stride_m, rows, Eo, static_cast<O*>(args.dy_t) + begin, args.dy_t_ld);
  if constexpr (!std::is_same_v<T, O>) {
    O* x_rows = static_cast<O*>(const_cast<void*>(args.x_rows)) + begin * E;
    O* dy_rows = static_cast<O*>(const_cast<void*>(args.dy_rows)) + begin * Eo;
    for (int64_t r = 0; r < rows; ++r) {
      if (!args.preact) widen(x + r * args.x_stride_m, E, x_rows + r * E);
      widen(dy + r * args.dy_stride_m, Eo, dy_rows + r * Eo);
    }
  }
}

// Products of rows (rows, k) with panels (k, kGradientPanel), which leave panels (strip,
// kGradientPanel).
template <typename O, typename C>
void times_panels(const FfnBwd& args, int64_t rows, int64_t k, const O* left, int64_t ld,
                  const O* panels, int64_t count, C* out, int64_t longest) {
  for (int64_t i = 0; i < rows; i += kGradientRowStep)
    for (int64_t p = 0; p < count; ++p)
      product(std::min(kGradientRowStep, rows - i), kGradientPanel, k, left + i * ld, ld,
              panels + p * k * kGradientPanel, kGradientPanel,
              out + (p * args.strip + i) * kGradientPanel, kGradientPanel, false, longest);
}

// The sum of a row of n numbers.
template <typename C, typename O>
double sum_row(const O* row, int64_t n, C* room) {
  if constexpr (std::is_same_v<O, C>) {
    return sum_lanes<C>(n, [&]<typename V>(int64_t i) { return load<V>(row + i); });
  } else {
    widen(row, n, room);
    return sum_row<C>(room, n, room);
  }
}

// Where a task forms the sums of a weight's gradient, null where it is not wanted: in the call's
// memory, or in its own, from where complete sums go into the result, rounded.
template <typename T, typename C = compute_t<T>>
struct Sums {
  C* first;
  int64_t ld, step;  // between rows, between panels; step 0: one product at a time
  T* result;         // null where the sums stay
  int64_t result_ld;
};

template <typename T, typename O, typename C = compute_t<T>>
void hidden(const FfnBwd& args, int64_t row, int64_t rows, int64_t feature, C* scratch) {
  const int64_t E = args.E, F = args.F, Eo = args.Eo, strip = args.strip;
  const int64_t n = std::min(args.chunk, F - feature), panels = ceil_div(n, kGradientPanel);
  const auto carve = [&](int64_t elements) { return std::exchange(scratch, scratch + elements); };
  const auto carve_operand = [&](int64_t elements) {
    return reinterpret_cast<O*>(carve(elements));
  };
  const bool again = !args.preact;
  O *w2 = carve_operand(args.chunk * Eo), *w1 = again ? carve_operand(args.chunk * E) : nullptr;
  O* gate = again && args.gated ? carve_operand(args.chunk * E) : nullptr;
  C *dh = carve(args.chunk * strip), *h = carve(args.chunk * strip);
  C* linear = args.gated ? carve(args.chunk * strip) : nullptr;
  const int64_t t_ld = strip + 16;
  O* dp_t = carve_operand(args.chunk * t_ld);
  O* dg_t = args.gated ? carve_operand(args.chunk * t_ld) : nullptr;

  // Of (height, width), whose rows lie ld apart in the result and in the call's memory.
  C* const own = scratch;
  const auto sums_of = [&](void* gradient, void* sums, int64_t at, int64_t ld, int64_t height,
                           int64_t width) {
    using S = Sums<T>;
    if (!gradient) return S{};
    if (!args.own_sums) return S{static_cast<C*>(sums) + at, ld, kGradientPanel, nullptr, 0};
    T* result = static_cast<T*>(gradient) + at;
    if (args.block <= strip) return S{own, kGradientPanel, 0, result, ld};
    const int64_t step = height * kGradientPanel;
    return S{carve(step * ceil_div(width, kGradientPanel)), kGradientPanel, step, result, ld};
  };
  const auto dw1 = sums_of(args.dw1, args.dw1_sum, feature * E, E, n, E);
  const auto dgate = sums_of(args.dgate, args.dgate_sum, feature * E, E, n, E);
  const auto dw2 = sums_of(args.dw2, args.dw2_sum, feature, F, Eo, n);

  pack_panels(static_cast<const T*>(args.w2) + feature, F, Eo, n, w2, Eo * kGradientPanel);
  for (int64_t p = 0; p < panels; ++p) {
    const int64_t f = feature + p * kGradientPanel, width = std::min(kGradientPanel, F - f);
    if (w1)
      turn_right(static_cast<const T*>(args.w1) + f * E, E, width, E, w1 + p * E * kGradientPanel,
                 kGradientPanel, kGradientPanel);
    if (gate)
      turn_right(static_cast<const T*>(args.gate) + f * E, E, width, E,
                 gate + p * E * kGradientPanel, kGradientPanel, kGradientPanel);
  }
  const O *dy = static_cast<const O*>(args.dy_rows), *x = static_cast<const O*>(args.x_rows);
  for (int64_t s = 0; s < rows; s += strip) {
    const int64_t m = std::min(strip, rows - s);
    const bool accumulate = row + s > 0;
    if (args.needs_dh())
      times_panels(args, m, Eo, dy + s * args.dy_rows_ld, args.dy_rows_ld, w2, panels, dh,
                   std::min(kLongestGradientSum, longest_sum<T>(kGradientPanel)));
    if (w1)
      times_panels(args, m, E, x + s * args.x_rows_ld, args.x_rows_ld, w1, panels, h,
                   longest_sum<T>(kGradientPanel));
    if (gate)
      times_panels(args, m, E, x + s * args.x_rows_ld, args.x_rows_ld, gate, panels, linear,
                   longest_sum<T>(kGradientPanel));

    O* dp = args.dp.at<O>(s, feature);
    O* dg = args.gated ? args.dg.at<O>(s, feature) : nullptr;
    alignas(64) C factors[kGradientPanel], unrounded[2][kGradientPanel];
    const auto place = [](O* row, [[maybe_unused]] C* room) {  // where C is formed
      if constexpr (std::is_same_v<O, C>)
        return row;
      else
        return room;
    };
    std::fill(factors, factors + kGradientPanel, C(1));
    for_activation(args.activation, [&](auto act) {
      using Act = decltype(act);
      const auto step = args.gated ? differentiate<Act, true, C> : differentiate<Act, false, C>;
      for (int64_t r = 0; r < m; ++r) {
        const int64_t at = row + s + r, number = args.dropout_rows ? args.dropout_rows[at] : at;
        const T* stored = static_cast<const T*>(args.preact);
        const int64_t stored_ld = args.gated ? 2 * F : F;
        if (stored) stored += at * stored_ld;
        if (stored && r + kAhead < m) prefetch(stored + kAhead * stored_ld + feature, n);
        if (r + kAhead < m)
          for (int64_t j = 0; j < n; j += kLine<O>)
            __builtin_prefetch(dp + (r + kAhead) * args.dp.ld + j, 1);
        for (int64_t p = 0; p < panels; ++p) {
          const int64_t f = feature + p * kGradientPanel, width = std::min(kGradientPanel, F - f);
          const int64_t in_panel = (p * strip + r) * kGradientPanel,
                        in_row = r * args.dp.ld + p * kGradientPanel;
          if (args.dropout.active())
            dropout_factors(args.dropout.seed, number, f, kGradientPanel, args.dropout.bound,
                            static_cast<C>(args.dropout.scale), factors);
          const auto bias = [&](const void* values) {
            return values ? static_cast<const T*>(values) + f : nullptr;
          };
          load_preact(stored ? stored + f : nullptr, bias(args.b1), width, h + in_panel);
          if (args.gated)
            load_preact(stored ? stored + F + f : nullptr, bias(args.gate_bias), width,
                        linear + in_panel);
          C* dp_row = place(dp + in_row, unrounded[0]);
          C* dg_row = args.gated ? place(dg + in_row, unrounded[1]) : nullptr;
          step(factors, dh + in_panel, h + in_panel, args.gated ? linear + in_panel : nullptr,
               dp_row, dg_row);
          as_left(dp_row, kGradientPanel, dp + in_row);
          if (dg_row) as_left(dg_row, kGradientPanel, dg + in_row);
        }
      }
    });

    const int64_t k = round_up(m, kPair<O>);
    const O* x_panels = static_cast<const O*>(args.x_panels) + s * kGradientPanel;
    // Adds left (height, k) right (k, width) to rows from `top` of panel p.
    const auto add = [&](const Sums<T>& to, int64_t p, int64_t top, int64_t height, int64_t width,
                         const O* left, int64_t ld, const O* right) {
      C* sums = to.first + p * to.step + (to.step ? top * to.ld : 0);
      product(height, width, k, left, ld, right, kGradientPanel, sums, to.ld, accumulate,
              kLongestGradientSum);
      if (!to.result || s + strip < rows) return;
      T* result = to.result + top * to.result_ld + p * kGradientPanel;
      for (int64_t i = 0; i < height; ++i)
        narrow(sums + i * to.ld, width, result + i * to.result_ld);
    };
    const auto weights = [&](const O* d, O* d_t, const Sums<T>& to) {
      turn_left(d, args.dp.ld, m, n, d_t, t_ld);
      if (!to.first) return;
      for (int64_t p = 0; p * kGradientPanel < E; ++p)
        add(to, p, 0, n, std::min(kGradientPanel, E - p * kGradientPanel), d_t, t_ld,
            x_panels + p * kGradientPanel * args.block);
    };
    if (args.dw1 || args.db1) weights(dp, dp_t, dw1);
    const auto biases = [&](const O* d_t, double* sums) {
      for (int64_t j = 0; j < n; ++j) {
        const double sum = sum_row<C>(d_t + j * t_ld, m, dh);
        sums[j] = accumulate ? sums[j] + sum : sum;
      }
    };
    const bool gate_biases = args.db1 && args.gate_bias;
    if (args.dgate || gate_biases) weights(dg, dg_t, dgate);
    if (args.db1) biases(dp_t, args.db1_sum + feature);
    if (gate_biases) biases(dg_t, args.db1_sum + F + feature);
    if (!args.dw2) continue;
    for (int64_t p = 0; p < panels; ++p) {
      C* values = h + p * strip * kGradientPanel;
      std::fill(values + m * kGradientPanel, values + k * kGradientPanel, C(0));
      const O* right = as_right(values, k, kGradientPanel,
                                reinterpret_cast<O*>(dh + p * strip * kGradientPanel));
      for (int64_t i = 0; i < Eo; i += kGradientRowStep)
        add(dw2, p, i, std::min(kGradientRowStep, Eo - i),
            std::min(kGradientPanel, n - p * kGradientPanel),
            static_cast<const O*>(args.dy_t) + i * args.dy_t_ld + s, args.dy_t_ld, right);
    }
  }
}

template <typename T, typename O, typename C = compute_t<T>>
void input(const FfnBwd& args, int64_t row, int64_t begin, int64_t end, int64_t first, int64_t last,
           O* panels) {
  const int64_t E = args.E, F = args.F, columns = last - first;
  C* dx = static_cast<C*>(args.dx_sum) + first;
  const auto add = [&](const void* weight, const Slices& d, int64_t f, int64_t n, bool accumulate) {
    slice_product(d, f, n, begin, end, static_cast<const T*>(weight) + f * E + first, E, columns,
                  dx, E, accumulate, panels);
  };
  if (F == 0)
    for (int64_t r = begin; r < end; ++r) std::fill_n(dx + r * E, columns, C(0));
  for (int64_t f = 0; f < F; f += kGradientSumStep) {
    const int64_t n = std::min(kGradientSumStep, F - f);
    add(args.w1, args.dp, f, n, f > 0);
    if (args.gated) add(args.gate, args.dg, f, n, true);
  }
  if constexpr (!std::is_same_v<T, C>)
    for (int64_t r = begin; r < end; ++r)
      narrow(dx + r * E, columns, static_cast<T*>(args.dx) + (row + r) * E + first);
}

}  // namespace

void ffn_bwd_prepare(const FfnBwd& args, DType dtype, int64_t row, int64_t begin, int64_t end) {
  for_operands(dtype, args.bf16_tiles, [&](auto zero, auto operand) {
    prepare<decltype(zero), decltype(operand)>(args, row, begin, end);
  });
}

void ffn_bwd_hidden(const FfnBwd& args, DType dtype, int64_t row, int64_t rows, int64_t feature,
                    void* scratch) {
  for_operands(dtype, args.bf16_tiles, [&](auto zero, auto operand) {
    using T = decltype(zero);
    hidden<T, decltype(operand)>(args, row, rows, feature, static_cast<compute_t<T>*>(scratch));
  });
}

void ffn_bwd_input(const FfnBwd& args, DType dtype, int64_t row, int64_t begin, int64_t end,
                   int64_t first, int64_t last, void* scratch) {
  for_operands(dtype, args.bf16_tiles, [&](auto zero, auto operand) {
    using O = decltype(operand);
    input<decltype(zero), O>(args, row, begin, end, first, last, static_cast<O*>(scratch));
  });
}

}  // namespace CPU_CAPABILITY
}  // namespace tfm_kernels
