// What tests/ptx puts in the place of CUDA's side of csrc/cuda/binding.h: kernels are registered
// for CPU tensors.
#pragma once

#define TFM_REGISTER(name) \
  STABLE_TORCH_LIBRARY_IMPL(tfm_kernels, CPU, m) { m.impl(#name, TORCH_BOX(&name)); }
