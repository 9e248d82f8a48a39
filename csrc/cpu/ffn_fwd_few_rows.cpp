// ffn_fwd, CPU: the kernels for few rows. Implements FFN.1 to FFN.4 of tfm_kernels/ops/ffn.py.
// Owns:    one task = a range of hidden features, then, when all of them are there, one of features
// of y.
// Traffic: reads the weights once, from L3 or memory, which is what it costs; x, h (M*F) and y stay
// in cache. 4*M*E*F FLOPs, 6 with a gate.
// Limits:  at most kFewRows rows. Sums in float32, in float64 for float64; bfloat16 products where
// the CPU has them. The result does not depend on the number of threads. Source:  own work.
#include "few_rows.h"
#include "ffn_hidden.h"

namespace tfm_kernels {
inline namespace CPU_CAPABILITY {
namespace {

template <typename T, typename O, typename C = compute_t<T>>
void hidden_features(const FfnFwd& args, int64_t begin, int64_t end, C* scratch) {
  const int64_t rows = args.M, ld = round_up(rows, 16);
  int64_t numbers[kFewRows] = {}, x_ld = args.x_stride_m;
  for (int64_t r = 0; r < rows; ++r) numbers[r] = args.dropout_rows ? args.dropout_rows[r] : r;
  O* const all = static_cast<O*>(args.hidden);
  C* const linear = args.gated ? scratch + few_rows_room(rows) : nullptr;
  C* const room = scratch + (args.gated ? 2 : 1) * few_rows_room(rows);
  const O* x = few_rows_operand(static_cast<const T*>(args.x), rows, args.E,
                                reinterpret_cast<O*>(room), x_ld);
  for (int64_t f = begin; f < end; f += kFewRowsStrip) {
    const int64_t n = std::min(kFewRowsStrip, end - f);
    C* hidden = scratch;
    if constexpr (std::is_same_v<O, C>)
      if (turns_rows<O>(rows)) hidden = all + f * ld;
    few_rows_product(n, rows, args.E, static_cast<const T*>(args.w1) + f * args.E, args.E, x, x_ld,
                     hidden, ld);
    if (linear)
      few_rows_product(n, rows, args.E, static_cast<const T*>(args.gate) + f * args.E, args.E, x,
                       x_ld, linear, ld);
    activate<T>(args, 0, rows, f, n, ld, hidden, linear);
    if (args.dropout.active()) drop(args.dropout, numbers, f, n, ld, hidden);
    if (turns_rows<O>(rows))
      as_right(hidden, n, ld, all + f * ld);
    else
      transpose_narrow<O>(hidden, ld, rows, n, nullptr, all + f, args.F);
  }
}

}  // namespace

void ffn_fwd_few_rows_hidden(const FfnFwd& args, DType dtype, int64_t begin, int64_t end,
                             void* scratch) {
  for_operands(dtype, args.bf16_tiles, [&](auto zero, auto operand) {
    using C = compute_t<decltype(zero)>;
    hidden_features<decltype(zero), decltype(operand)>(args, begin, end, static_cast<C*>(scratch));
  });
}

void ffn_fwd_few_rows_out(const FfnFwd& args, DType dtype, int64_t begin, int64_t end,
                          void* scratch) {
  for_operands(dtype, args.bf16_tiles, [&](auto zero, auto operand) {
    using T = decltype(zero);
    using O = decltype(operand);
    using C = compute_t<T>;
    const int64_t ld = turns_rows<O>(args.M) ? round_up(args.M, 16) : args.F;
    few_rows_linear(begin, end, args.M, args.F, static_cast<const O*>(args.hidden), ld,
                    static_cast<const T*>(args.w2), args.F, static_cast<const T*>(args.b2),
                    static_cast<T*>(args.y), args.Eo, static_cast<C*>(scratch));
  });
}

}  // namespace CPU_CAPABILITY
}  // namespace tfm_kernels
