// The gradients of a call of linear_cross_entropy, block of rows by block of rows: for its
// backward, which computes the logits again, and for a forward that leaves gradients and has them
// at hand.
#pragma once
#include "gradient.h"
#include "isa.h"
#include "linear_cross_entropy.h"

namespace tfm_kernels {

struct CrossEntropyBwd {
  const void *x, *weight, *bias;  // weight contiguous; bias may be null, or in the logits already
  const void *dloss, *lse;        // of the present block, of the compute type
  const int64_t* target;          // of the present block
  // In a storage type that is no compute type, or null: dx of the present block; dweight of one
  // tile of rows, whose sums nobody else adds to.
  void *dx, *dweight;
  double* dbias;  // (V), or null
  int64_t x_stride_m, M, K, V;
  bool bf16_tiles;                    // bfloat16 is multiplied as it is stored
  double target_share, other_share;   // 1 - s and s / V of LCE.4
  int64_t block, tile, panel, chunk;  // rows; classes a task
  // Working memory, in the type of operands but for logits and sums, which are of the compute type.
  void* logits;  // of the present block: panels of rows, each (V, width); null: computed again
  void* x_t;  // panels of rows of the present block, each (K, width); null where logits are there
  void* x_panels;              // panels of columns, each (block, width)
  Slices dz;                   // of the present block
  void *dx_sum, *dweight_sum;  // (block, K) of the present block, (V, K); null where not wanted
};

constexpr int64_t kDzPad = 16;  // between rows of dz: a power of two apart they would thrash L1

// Elements of working memory that one task of `classes` or `input` needs.
inline int64_t cross_entropy_bwd_scratch(const CrossEntropyBwd& args) {
  return std::max(args.chunk * (args.panel + args.tile + kDzPad + kPanel) + widened_room(args.K),
                  round_up(std::min(args.V, kGradientSumStep), 2) * round_up(args.K, kPanel));
}

// `row` is the first of the present block, which has `rows`; begin and end count within it.
TFM_DECLARE_KERNEL(void cross_entropy_bwd_prepare(const CrossEntropyBwd& args, DType dtype,
                                                  int64_t row, int64_t begin, int64_t end))
TFM_DECLARE_KERNEL(void cross_entropy_bwd_classes(const CrossEntropyBwd& args, DType dtype,
                                                  int64_t row, int64_t rows, int64_t first,
                                                  void* scratch))
// Columns first..last - 1 of dx; `first` is a multiple of kPanel.
TFM_DECLARE_KERNEL(void cross_entropy_bwd_input(const CrossEntropyBwd& args, DType dtype,
                                                int64_t begin, int64_t end, int64_t first,
                                                int64_t last, void* scratch))

// out = factor * sums over n numbers of the compute type, rounded once.
TFM_DECLARE_KERNEL(void cross_entropy_bwd_scale(const void* sums, double factor, int64_t n,
                                                DType dtype, void* out))

}  // namespace tfm_kernels

#ifdef CPU_CAPABILITY_DEFAULT
namespace tfm_kernels {

// Sums the gradients of a call's rows. They are of the storage type, or of the compute type; empty
// where they are not wanted.
class CrossEntropyGradients {
 public:
  // keeps_logits: add() finds those of its block where blocks() says, with their bias.
  CrossEntropyGradients(const CrossEntropyRows& rows, double label_smoothing, bool keeps_logits,
                        const at::Tensor& dx, const at::Tensor& dweight, const at::Tensor& dbias);

  const CrossEntropyBwd& blocks() const { return args_; }

  // Adds the rows from `row` on, a block or what is left; dloss and lse are theirs.
  void add(int64_t row, const void* dloss, const void* lse);

  // To be called after the last block.
  void finish() const;

 private:
  void* room(at::Tensor& owner, bool needed, int64_t elements) const;

  const CrossEntropyRows& rows_;
  at::Tensor dx_, dweight_, dbias_;
  int64_t item_;  // bytes of the compute type
  CrossEntropyBwd args_{};
  at::Tensor logits_, x_t_, x_panels_, dz_, dx_sum_, dweight_sum_, dbias_sum_, scratch_;
};

}  // namespace tfm_kernels
#endif
