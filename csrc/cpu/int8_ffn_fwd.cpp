// int8_ffn_fwd, CPU. Implements INT8_FFN.1 to .4 of tfm_kernels/ops/int8_ffn.py.
// Owns:    one task = a tile of 64 rows. Everything between x and y is held transposed, (features,
//          rows): the hidden activation as it is activated, its integers as the second product
//          takes them, which a transposed activation is rounded into without being turned.
// Traffic: x and y once; the weights, a byte each, once a tile, from L3. 4*M*E*F operations in
//          int32, exactly, 6 with a gate.
// Limits:  none. Few rows, and all whose numbers are not rounded, go feature by feature through
//          int8_linear_fwd instead.
// Source:  own work.
#include "hidden.h"
#include "int8_products.h"
#include "int8_rounding.h"
#include "isa.h"

namespace tfm_kernels {

struct Int8FfnFwd {
  const void *x, *b1, *b2;        // b1, b2 may be null
  const int8_t *w1, *w2, *gate;   // contiguous; gate may be null
  const float *s1, *s2, *s_gate;  // the sizes of their steps
  void* y;                        // contiguous
  int64_t x_stride_m, M, E, F, Eo;
  Activation activation;
  IntegerUnit unit;
  int64_t tile;  // rows, a multiple of kPanelRows
};

TFM_DECLARE_KERNEL(void int8_ffn_fwd(const Int8FfnFwd& args, DType dtype, int64_t row,
                                     void* scratch))

// The hidden activation of few rows, n numbers of the compute type; gate may be null.
TFM_DECLARE_KERNEL(void int8_ffn_activate(Activation activation, DType dtype, int64_t n,
                                          void* hidden, const void* gate))

// Elements of working memory that a tile needs: for the hidden activation and the steps; rows of x
// as they are widened and rounded, and the integers of both products; one strip of sums, and of the
// gate's.
inline int64_t int8_ffn_fwd_scratch(const Int8FfnFwd& args) {
  const int64_t filled = round_up(args.E, kIntegers), hidden = round_up(args.F, kIntegers);
  return (args.F + 4) * args.tile + args.E + kPanelRows * filled + args.tile * (filled + hidden) +
         2 * kFewRowsStrip * args.tile;
}

inline namespace CPU_CAPABILITY {
namespace {

// Features f..f + n - 1 of the hidden activation, h (n, ld), from the sums of the first products,
// and the largest bits of each row. `gated`: the gate's sums, where there is one. (A block of rows
// at a time, so that what the activation takes from memory is taken once for all features.)
template <typename T, bool kGated, typename Act, typename C = compute_t<T>>
void hidden_strip(const Int8FfnFwd& args, Act act, int64_t f, int64_t n, int64_t ld,
                  const int32_t* sums, [[maybe_unused]] const int32_t* gated, const C* step, C* h,
                  bits_t<C>* most) {
  alignas(64) C shift[kFewRowsStrip] = {};
  if (args.b1) widen(static_cast<const T*>(args.b1) + f, n, shift);
  for (int64_t r = 0; r < ld; r += kRoundedRows) {
    for (int64_t i = 0; i < n; ++i) {
      const C of_feature = args.s1[f + i], of_gate = kGated ? args.s_gate[f + i] : 0.0f;
      const int64_t at = i * ld + r;
#pragma omp simd
      for (int64_t l = 0; l < kRoundedRows; ++l) {
        C x = act.value(static_cast<C>(sums[at + l]) * (step[r + l] * of_feature) + shift[i]);
        if constexpr (kGated) x *= static_cast<C>(gated[at + l]) * (step[r + l] * of_gate);
        h[at + l] = x;
        most[r + l] = larger_bits(most[r + l], x);
      }
    }
  }
}

template <typename T, typename P, typename C = compute_t<T>>
void run_tile(const Int8FfnFwd& args, int64_t row, C* hidden) {
  using E = typename P::E;
  using Bits = bits_t<C>;
  const int64_t rows = std::min(args.tile, args.M - row), ld = round_up(rows, 16);
  const int64_t filled = round_up(args.E, kIntegers), filled_f = round_up(args.F, kIntegers);
  C *step = hidden + args.F * args.tile, *factor = step + args.tile;
  Bits* most = reinterpret_cast<Bits*>(factor + args.tile);
  C *hidden_step = reinterpret_cast<C*>(most + args.tile), *wide = hidden_step + args.tile;
  E *flat = reinterpret_cast<E*>(wide + args.E), *panels = flat + kPanelRows * filled;
  E* hidden_panels = panels + args.tile * filled;
  int32_t* sums = reinterpret_cast<int32_t*>(hidden_panels + args.tile * filled_f);
  int32_t* gated = sums + kFewRowsStrip * args.tile;

  const T* x = static_cast<const T*>(args.x) + row * args.x_stride_m;
  for (int64_t p = 0; p < rows; p += kPanelRows) {
    const int64_t real = std::min(kPanelRows, rows - p);
    round_rows<P>(x + p * args.x_stride_m, args.x_stride_m, real, args.E, filled, wide, flat,
                  step + p);
    turn_panel<P>(flat, real, filled, panels + p * filled);
  }
  std::fill_n(most, ld, Bits(0));
  const auto multiply = [&](const int8_t* w, int64_t f, int64_t n, int32_t* out) {
    integer_products<P>(n, rows, args.E, w + f * args.E, args.E, panels, filled, true, out, ld);
  };
  for (int64_t f = 0; f < args.F; f += kFewRowsStrip) {
    const int64_t n = std::min(kFewRowsStrip, args.F - f);
    multiply(args.w1, f, n, sums);
    if (args.gate) multiply(args.gate, f, n, gated);
    for_activation(args.activation, [&](auto act) {
      const auto strip =
          args.gate ? hidden_strip<T, true, decltype(act)> : hidden_strip<T, false, decltype(act)>;
      strip(args, act, f, n, ld, sums, gated, step, hidden + f * ld, most);
    });
  }
  for (int64_t r = 0; r < ld; ++r) hidden_step[r] = step_of<C>(most[r], factor[r]);
  for (int64_t p = 0; p < ld; p += kPanelRows)
    round_columns<P>(args.F, filled_f, std::min(kPanelRows, ld - p), hidden + p, ld, factor + p,
                     hidden_panels + p * filled_f);
  integer_linear<P>(0, args.Eo, rows, args.F, args.w2, args.F, hidden_panels, filled_f, true,
                    hidden_step, args.s2, static_cast<const T*>(args.b2),
                    static_cast<T*>(args.y) + row * args.Eo, args.Eo, sums);
}

}  // namespace

void int8_ffn_fwd(const Int8FfnFwd& args, DType dtype, int64_t row, void* scratch) {
  for_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    for_integers(args.unit, [&](auto how) {
      run_tile<T, decltype(how)>(args, row, static_cast<compute_t<T>*>(scratch));
    });
  });
}

void int8_ffn_activate(Activation activation, DType dtype, int64_t n, void* hidden,
                       const void* gate) {
  if (dtype == DType::f64)
    activate(activation, n, static_cast<double*>(hidden), static_cast<const double*>(gate));
  else
    activate(activation, n, static_cast<float*>(hidden), static_cast<const float*>(gate));
}

}  // namespace CPU_CAPABILITY
}  // namespace tfm_kernels

#ifdef CPU_CAPABILITY_DEFAULT
#include <ATen/Parallel.h>
#include <torch/library.h>

#include "operators.h"
#include "rows.h"

namespace tfm_kernels {
namespace {

constexpr int64_t kTile = 64;

// The features of both products are dealt out, which tiles of rows cannot be.
at::Tensor by_features(const at::Tensor& x, const at::Tensor& w1, const at::Tensor& s1,
                       const OptionalTensor& b1, const at::Tensor& w2, const at::Tensor& s2,
                       const OptionalTensor& b2, const OptionalTensor& gate,
                       const OptionalTensor& s_gate, Activation activation, bool dynamic) {
  const auto compute = compute_type(x.scalar_type());
  const auto wide = [&](const OptionalTensor& t) {
    return t ? OptionalTensor(t->to(compute)) : std::nullopt;
  };
  const at::Tensor rows = x.to(compute);
  at::Tensor hidden = int8_linear_fwd_cpu(rows, w1, s1, wide(b1), dynamic), gated;
  if (gate) gated = int8_linear_fwd_cpu(rows, *gate, *s_gate, std::nullopt, dynamic);
  constexpr int64_t kBlock = 1024, kBlocksAThread = 8;
  char* numbers = static_cast<char*>(hidden.mutable_data_ptr());
  const char* factors = gate ? static_cast<const char*>(gated.const_data_ptr()) : nullptr;
  at::parallel_for(
      0, ceil_div(hidden.numel(), kBlock), kBlocksAThread, [&](int64_t first, int64_t last) {
        const int64_t begin = first * kBlock, end = std::min(last * kBlock, hidden.numel());
        const int64_t offset = begin * hidden.element_size();
        TFM_KERNEL(int8_ffn_activate)
        (activation, dtype_of(compute), end - begin, numbers + offset,
         factors ? factors + offset : nullptr);
      });
  return int8_linear_fwd_cpu(hidden, w2, s2, wide(b2), dynamic).to(x.scalar_type());
}

at::Tensor int8_ffn_fwd_cpu(const at::Tensor& x, const at::Tensor& w1, const at::Tensor& s1,
                            const OptionalTensor& b1, const at::Tensor& w2, const at::Tensor& s2,
                            const OptionalTensor& b2, const OptionalTensor& gate,
                            const OptionalTensor& s_gate, int64_t activation, bool dynamic) {
  constexpr const char* kOp = "int8_ffn_fwd_cpu";
  check_floating(x, kOp, "x");
  TORCH_CHECK(x.dim() == 2 && w1.dim() == 2 && w2.dim() == 2, kOp,
              ": x, w1 and w2 must have 2 dimensions");
  TORCH_CHECK(activation >= 0 && activation <= 3, kOp, ": activation must lie in 0..3");
  TORCH_CHECK(gate.has_value() == s_gate.has_value(), kOp, ": gate and its steps come together");
  const int64_t M = x.size(0), E = x.size(1), F = w1.size(0), Eo = w2.size(0);
  check_int8_weight(w1, s1, F, E, kOp, "w1");
  check_int8_weight(w2, s2, Eo, F, kOp, "w2");
  if (gate) check_int8_weight(*gate, *s_gate, F, E, kOp, "gate");
  if (dynamic) {
    check_integer_width(E, kOp, "x");
    check_integer_width(F, kOp, "w2");
  }
  check_vector(b1, F, x, kOp, "b1");
  check_vector(b2, Eo, x, kOp, "b2");
  const auto act = static_cast<Activation>(activation);
  const int64_t threads = at::get_num_threads(), tiles = ceil_div(M, kTile);
  if (!dynamic || tiles < 2 * threads || E == 0 || F == 0)
    return by_features(x, w1, s1, b1, w2, s2, b2, gate, s_gate, act, dynamic);

  at::Tensor y = new_output({M, Eo}, x.options());
  const at::Tensor rows = unit_rows(x);
  const at::Tensor weights[] = {w1.contiguous(), w2.contiguous()};
  const at::Tensor steps[] = {s1.contiguous(), s2.contiguous()};
  const OptionalTensor third = contiguous(gate), third_steps = contiguous(s_gate);
  const OptionalTensor shifts[] = {contiguous(b1), contiguous(b2)};
  Int8FfnFwd args{};
  args.x = rows.const_data_ptr();
  args.b1 = pointer(shifts[0]);
  args.b2 = pointer(shifts[1]);
  args.w1 = weights[0].const_data_ptr<int8_t>();
  args.w2 = weights[1].const_data_ptr<int8_t>();
  args.gate = third ? third->const_data_ptr<int8_t>() : nullptr;
  args.s1 = steps[0].const_data_ptr<float>();
  args.s2 = steps[1].const_data_ptr<float>();
  args.s_gate = third ? third_steps->const_data_ptr<float>() : nullptr;
  args.y = y.mutable_data_ptr();
  args.x_stride_m = rows.stride(0);
  args.M = M;
  args.E = E;
  args.F = F;
  args.Eo = Eo;
  args.activation = act;
  args.unit = integer_unit(M);
  args.tile = kTile;
  const int64_t room = int8_ffn_fwd_scratch(args);
  const Workspace workspace(x, threads * room, 0);
  for_tasks(tiles, threads, [&](int64_t tile, int64_t worker) {
    TFM_KERNEL(int8_ffn_fwd)
    (args, dtype_of(x.scalar_type()), tile * kTile, workspace.first(worker * room));
  });
  return y;
}

}  // namespace

TORCH_LIBRARY_IMPL(tfm_kernels, CPU, m) { m.impl("int8_ffn_fwd_cpu", &int8_ffn_fwd_cpu); }

}  // namespace tfm_kernels
#endif
