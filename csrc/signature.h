// The Python function _C.signature, for module.cpp.
#pragma once
#include <Python.h>

namespace tfm_kernels {

// bytes that hold, of every part, its type and value: of a tensor dtype, layout, device, shape and
// whether it needs a gradient. None where a part is of another kind (a subclass of Tensor, a list).
PyObject* signature(PyObject* module, PyObject* const* parts, Py_ssize_t count);

}  // namespace tfm_kernels
