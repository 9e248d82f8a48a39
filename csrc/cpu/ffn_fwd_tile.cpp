// ffn_fwd, CPU: the kernels for tiles of rows. Implements FFN.1 to FFN.4 of tfm_kernels/ops/ffn.py.
// Owns:    one task = a tile of 16 to 256 rows and a segment of the hidden features, taken in
// chunks. Everything is held
//          transposed, (features, rows), in panels of rows: x^T and y^T of the tile, h^T of a
//          panel's chunk, so that the weights are the left operand as they lie in memory and are
//          never packed, and the hidden activation never leaves L2.
// Traffic: reads x (M*E), writes y (M*Eo) and preact (M*F) where asked; reads the weights once per
// tile, from L3.
//          4*M*E*F FLOPs, 6 with a gate.
// Limits:  none; float64 computes in float64 by plain loops, everything else in float32, with
//          bfloat16 products where the CPU has them.
// Config:  pick_tiling() of ffn_fwd.cpp. Source:  own work.
#include "ffn_hidden.h"
#include "weights.h"

namespace tfm_kernels {
inline namespace CPU_CAPABILITY {
namespace {

template <typename T, typename O, typename C = compute_t<T>>
void run_task(const FfnFwd& args, int64_t tile, int64_t segment, C* y, C* scratch) {
  const auto& tiling = args.tiling;
  const int64_t E = args.E, F = args.F, Eo = args.Eo, hidden_size = tiling.chunk * tiling.panel;
  const int64_t row = tile * tiling.rows, rows = std::min(tiling.rows, args.M - row);
  C *hidden = scratch + E * tiling.rows, *linear = args.gated ? hidden + hidden_size : nullptr;
  O* x = reinterpret_cast<O*>(scratch);
  C* wide = hidden + (args.gated ? 2 : 1) * hidden_size;
  int64_t numbers[kMaxTileRows] = {};
  for (int64_t r = 0; r < rows; ++r)
    numbers[r] = args.dropout_rows ? args.dropout_rows[row + r] : row + r;

  for_panels(tiling.rows, tiling.panel, rows, [&](int64_t p, int64_t ld, int64_t real) {
    turn_right(static_cast<const T*>(args.x) + (row + p) * args.x_stride_m, args.x_stride_m, real,
               E, x + p * E, ld, ld);
  });
  const int64_t chunks = (F + tiling.chunk - 1) / tiling.chunk;
  const int64_t first = chunks * segment / tiling.segments * tiling.chunk;
  const int64_t last = std::min(F, chunks * (segment + 1) / tiling.segments * tiling.chunk);
  if (first >= last) std::fill(y, y + Eo * tiling.rows, C(0));
  for (int64_t f = first; f < last; f += tiling.chunk) {
    const int64_t n = std::min(tiling.chunk, last - f);
    for_panels(tiling.rows, tiling.panel, rows, [&](int64_t p, int64_t ld, int64_t real) {
      weights_product(n, ld, E, static_cast<const T*>(args.w1) + f * E, E, x + p * E, ld, hidden,
                      ld, false, wide, longest_sum<T>(ld));
      if (linear)
        weights_product(n, ld, E, static_cast<const T*>(args.gate) + f * E, E, x + p * E, ld,
                        linear, ld, false, wide, longest_sum<T>(ld));
      activate<T>(args, row + p, real, f, n, ld, hidden, linear);
      if (args.dropout.active()) drop(args.dropout, numbers + p, f, n, ld, hidden);
      weights_product(Eo, ld, n, static_cast<const T*>(args.w2) + f, F,
                      as_right(hidden, n, ld, reinterpret_cast<O*>(wide)), ld, y + p * Eo, ld,
                      f > first, wide, longest_sum<T>(ld));
    });
  }
}

template <typename T, typename C = compute_t<T>>
void join(const FfnFwd& args, int64_t tile, int64_t begin, int64_t end, C* partials) {
  const auto& tiling = args.tiling;
  const int64_t Eo = args.Eo, row = tile * tiling.rows;
  const T* bias = args.b2 ? static_cast<const T*>(args.b2) + begin : nullptr;
  for_panels(tiling.rows, tiling.panel, args.M - row, [&](int64_t p, int64_t ld, int64_t real) {
    C* sum = partials + p * Eo + begin * ld;
    for (int64_t segment = 1; segment < tiling.segments; ++segment) {
      const C* part = sum + segment * Eo * tiling.rows;
#pragma omp simd
      for (int64_t j = 0; j < (end - begin) * ld; ++j) sum[j] += part[j];
    }
    transpose_narrow(sum, ld, real, end - begin, bias,
                     static_cast<T*>(args.y) + (row + p) * Eo + begin, Eo);
  });
}

}  // namespace

void ffn_fwd(const FfnFwd& args, DType dtype, int64_t tile, int64_t segment, void* partial,
             void* scratch) {
  for_operands(dtype, args.bf16_tiles, [&](auto zero, auto operand) {
    using C = compute_t<decltype(zero)>;
    run_task<decltype(zero), decltype(operand)>(args, tile, segment, static_cast<C*>(partial),
                                                static_cast<C*>(scratch));
  });
}

void ffn_fwd_join(const FfnFwd& args, DType dtype, int64_t tile, int64_t begin, int64_t end,
                  void* partials) {
  for_dtype(dtype, [&](auto zero) {
    join<decltype(zero)>(args, tile, begin, end, static_cast<compute_t<decltype(zero)>*>(partials));
  });
}

}  // namespace CPU_CAPABILITY
}  // namespace tfm_kernels
