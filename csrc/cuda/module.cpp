// The Python module tfm_kernels._cuda. Importing it registers the CUDA kernels, touching no device;
// build_info() says what they were built for.
#include <Python.h>

namespace {

PyObject* build_info(PyObject* /*module*/, PyObject* /*arguments*/) {
  return Py_BuildValue("{s:s,s:s,s:s,s:s}", "architectures", TFM_CUDA_ARCHS, "cuda",
                       TFM_CUDA_VERSION, "flags", TFM_CUDA_FLAGS, "compiler", __VERSION__);
}

PyMethodDef methods[] = {{"build_info", build_info, METH_NOARGS, "build_info() -> dict"},
                         {nullptr, nullptr, 0, nullptr}};
PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_cuda", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__cuda() { return PyModule_Create(&definition); }
