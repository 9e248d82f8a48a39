// The Python module tfm_kernels._C. Importing it registers the CPU kernels; build_info() says what
// it was built for, signature() and launch_signature() make keys of calls, plan() and apply() carry
// calls out.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/headeronly/version.h>

#include <string>

#include "apply.h"
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
#ifndef TFM_WITHOUT_AVX512
    if (name == "AVX512") return Isa::avx512;
#endif
#ifndef TFM_WITHOUT_AVX2
    if (name == "AVX512" || name == "AVX2") return Isa::avx2;
#endif
    return Isa::standard;
  }();
  return best;
}

}  // namespace tfm_kernels

PYBIND11_MODULE(_C, m) {
  static PyMethodDef methods[] = {
      {"signature",
       reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&tfm_kernels::signature)),
       METH_FASTCALL, "signature(*parts) -> bytes | None"},
      {"launch_signature",
       reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&tfm_kernels::launch_signature)),
       METH_FASTCALL, "launch_signature(*parts) -> bytes | None"},
      {"apply", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&tfm_kernels::apply)),
       METH_FASTCALL, "apply(plan, *arguments) -> Tensor | tuple[Tensor, ...] | NotImplemented"},
      {"shaped_like",
       reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&tfm_kernels::shaped_like)),
       METH_FASTCALL, "shaped_like(y, x) -> Tensor | NotImplemented"},
      {nullptr, nullptr, 0, nullptr}};
  PyModule_AddFunctions(m.ptr(), methods);
  m.def(
      "plan",
      [](std::string forward, std::string backward, std::vector<std::array<int64_t, 2>> sources,
         std::vector<std::array<int64_t, 2>> targets, std::vector<std::array<int64_t, 3>> absent,
         std::vector<int64_t> differentiable, int64_t like) {
        return tfm_kernels::add_plan({std::move(forward), std::move(backward), std::move(sources),
                                      std::move(targets), std::move(absent),
                                      std::move(differentiable), like});
      },
      pybind11::arg("forward"), pybind11::arg("backward") = "", pybind11::kw_only(),
      pybind11::arg("sources") = std::vector<std::array<int64_t, 2>>(),
      pybind11::arg("targets") = std::vector<std::array<int64_t, 2>>(),
      pybind11::arg("absent") = std::vector<std::array<int64_t, 3>>(),
      pybind11::arg("differentiable") = std::vector<int64_t>(), pybind11::arg("like") = -1);
  m.def("build_info", [] {
    pybind11::dict info;
    info["torch"] = TORCH_VERSION;
    info["compiler"] = __VERSION__;
    info["cpu_capability"] = at::get_cpu_capability();
    info["bf16_tiles"] = tfm_kernels::has_bf16_tiles();
    info["amx"] = tfm_kernels::has_amx();
    info["vnni"] = tfm_kernels::has_vnni();
    info["int8_tiles"] = tfm_kernels::has_int8_tiles();
    info["amd"] = false;
#if defined(__x86_64__)
    std::string sets = "DEFAULT";
#if !defined(TFM_WITHOUT_AVX2)
    sets += " AVX2";
#endif
#if !defined(TFM_WITHOUT_AVX512)
    sets += " AVX512";
#endif
    info["instruction_sets"] = sets;
    info["amd"] = static_cast<bool>(__builtin_cpu_is("amd"));
#elif defined(__aarch64__)
    info["instruction_sets"] = "NEON";
#else
    info["instruction_sets"] = "DEFAULT";
#endif
    return info;
  });
}
