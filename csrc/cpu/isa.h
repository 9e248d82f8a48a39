// One kernel source, compiled once per instruction set; the host side picks at run time.
//
// On x86-64 setup.py compiles every csrc/cpu/*.cpp three times (CPU_CAPABILITY = DEFAULT, AVX2,
// AVX512), elsewhere once. Kernels live in `namespace tfm_kernels::CPU_CAPABILITY` and take raw
// pointers; host code, which includes torch's headers, lives between `#ifdef
// CPU_CAPABILITY_DEFAULT` and `#endif`, so that only the baseline build sees it and no inline
// function of torch is ever linked from an object that needs a newer CPU.
#pragma once

namespace tfm_kernels {
enum class Isa { standard, avx2, avx512 };
Isa isa();  // torch's own choice: the CPU's best, or lower where ATEN_CPU_CAPABILITY=default|avx2
            // says so
}  // namespace tfm_kernels

#if defined(__x86_64__)
#define TFM_DECLARE_KERNEL(...) \
  namespace DEFAULT {           \
  __VA_ARGS__;                  \
  }                             \
  namespace AVX2 {              \
  __VA_ARGS__;                  \
  }                             \
  namespace AVX512 {            \
  __VA_ARGS__;                  \
  }
// A build may leave out what its processor does not run (TFM_KERNELS_ISAS of setup.py).
#if defined(TFM_WITHOUT_AVX2) && defined(TFM_WITHOUT_AVX512)
#define TFM_KERNEL(name) (DEFAULT::name)
#elif defined(TFM_WITHOUT_AVX512)
#define TFM_KERNEL(name) (tfm_kernels::isa() == tfm_kernels::Isa::avx2 ? AVX2::name : DEFAULT::name)
#elif defined(TFM_WITHOUT_AVX2)
#define TFM_KERNEL(name) \
  (tfm_kernels::isa() == tfm_kernels::Isa::avx512 ? AVX512::name : DEFAULT::name)
#else
#define TFM_KERNEL(name)                                         \
  (tfm_kernels::isa() == tfm_kernels::Isa::avx512 ? AVX512::name \
   : tfm_kernels::isa() == tfm_kernels::Isa::avx2 ? AVX2::name   \
                                                  : DEFAULT::name)
#endif
#else
#define TFM_DECLARE_KERNEL(...) \
  namespace DEFAULT {           \
  __VA_ARGS__;                  \
  }
#define TFM_KERNEL(name) (DEFAULT::name)
#endif
