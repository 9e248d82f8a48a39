// The Python module tfm_kernels._C. Importing it registers the CPU kernels; build_info() says what
// it was built for, signature() makes keys of calls.
#include <pybind11/pybind11.h>
#include <torch/headeronly/version.h>

#include <string>

#include "cpu/gemm.h"
#include "cpu/isa.h"
#include "signature.h"

namespace at {
// Declared here because the header that declares it costs two seconds of compile time.
__attribute__((visibility("default"))) std::string get_cpu_capability();
}  // namespace at

namespace tfm_kernels {

Isa isa() {
  static const Isa best = [] {
    const std::string name = at::get_cpu_capability();
    return name == "AVX512" ? Isa::avx512 : name == "AVX2" ? Isa::avx2 : Isa::standard;
  }();
  return best;
}

}  // namespace tfm_kernels

PYBIND11_MODULE(_C, m) {
  static PyMethodDef methods[] = {
      {"signature",
       reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&tfm_kernels::signature)),
       METH_FASTCALL, "signature(*parts) -> bytes | None"},
      {nullptr, nullptr, 0, nullptr}};
  PyModule_AddFunctions(m.ptr(), methods);
  m.def("build_info", [] {
    pybind11::dict info;
    info["torch"] = TORCH_VERSION;
    info["compiler"] = __VERSION__;
    info["cpu_capability"] = at::get_cpu_capability();
    info["bf16_tiles"] = tfm_kernels::has_bf16_tiles();
#if defined(__x86_64__)
    info["instruction_sets"] = "DEFAULT AVX2 AVX512";
#else
    info["instruction_sets"] = "DEFAULT";
#endif
    return info;
  });
}
