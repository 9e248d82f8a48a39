// Pairs of features turned by angles: what rotary_fwd and rotary_bwd share.
#pragma once
#include "isa.h"
#include "parameter.h"

namespace tfm_kernels {

struct Rotary {
  const void* x;                     // (B, H, T, D), D side by side
  void* y;                           // likewise
  int64_t x_stride[3], y_stride[3];  // of B, H, T
  const void *cos, *sin;             // (1 or B, T, R), R side by side
  DType angle_type;
  int64_t angle_stride[2];  // of B, T
  int64_t heads, length, width, turned;
  bool interleaved, back;
};

// Positions begin to end of B * T; scratch holds 3 R numbers of the compute type.
TFM_DECLARE_KERNEL(void rotary(const Rotary& args, DType dtype, int64_t begin, int64_t end,
                               void* scratch))

}  // namespace tfm_kernels

#ifdef CPU_CAPABILITY_DEFAULT
#include "layer_norm.h"

namespace tfm_kernels {

// The whole call: x turned, or turned back.
at::Tensor turned(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin,
                  bool interleaved, bool back, const char* op, const char* name);

}  // namespace tfm_kernels
#endif
