// rotary_bwd, CPU. Implements ROTARY.2 of tfm_kernels/ops/rotary.py: the turn back, by the kernel
// of rotary_fwd.
#include "rotary.h"

#ifdef CPU_CAPABILITY_DEFAULT
#include <torch/library.h>

namespace tfm_kernels {
namespace {

at::Tensor rotary_bwd_cpu(const at::Tensor& dy, const at::Tensor& cos, const at::Tensor& sin,
                          bool interleaved) {
  return turned(dy, cos, sin, interleaved, true, "rotary_bwd_cpu", "dy");
}

TORCH_LIBRARY_IMPL(tfm_kernels, CPU, m) { m.impl("rotary_bwd_cpu", &rotary_bwd_cpu); }

}  // namespace
}  // namespace tfm_kernels
#endif
