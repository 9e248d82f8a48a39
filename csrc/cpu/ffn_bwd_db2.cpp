// ffn_bwd, CPU: db2 of FFN.5 of tfm_kernels/ops/ffn.py, the sum of dy over its rows.
//
// In a kernel of its own because at::sum adds in an order that depends on the number of threads.
// Owns: one call of the kernel = up to kFfnBiasColumns columns, all rows.
// Traffic: reads dy once, a stretch of each row. M*Eo FLOPs.
// Limits: none; kBlock rows are summed in the compute type, blocks in float64.
// Source: own work.
#include "ffn_bwd.h"
#include "prefetch.h"

namespace tfm_kernels {
inline namespace CPU_CAPABILITY {
namespace {

constexpr int64_t kBlock = 64;

template <typename T, typename C = compute_t<T>>
void sum_columns(const T* dy, int64_t stride, int64_t rows, int64_t n, T* out) {
  using V = at::vec::Vectorized<C>;
  alignas(64) C part[kFfnBiasColumns];
  double total[kFfnBiasColumns] = {};
  for (int64_t first = 0; first < rows; first += kBlock) {
    const int64_t last = std::min(rows, first + kBlock);
    std::fill_n(part, n, C(0));
    for (int64_t r = first; r < last; ++r) {
      const T* row = dy + r * stride;
      if (r + kAhead < rows) prefetch(row + kAhead * stride, n);
      int64_t j = 0;
      for (; j + V::size() <= n; j += V::size())
        (V::loadu(part + j) + load_wide(row + j)).store(part + j);
      for (; j < n; ++j) part[j] += static_cast<C>(row[j]);
    }
    for (int64_t j = 0; j < n; ++j) total[j] += part[j];
  }
  for (int64_t j = 0; j < n; ++j) out[j] = static_cast<T>(static_cast<C>(total[j]));
}

}  // namespace

void ffn_bwd_db2(const FfnBwd& args, DType dtype, int64_t first, int64_t last) {
  for_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    sum_columns(static_cast<const T*>(args.dy) + first, args.dy_stride_m, args.M, last - first,
                static_cast<T*>(args.db2) + first);
  });
}

}  // namespace CPU_CAPABILITY
}  // namespace tfm_kernels
