// The Python functions _C.signature and _C.launch_signature, for module.cpp.
#pragma once
#include <Python.h>

namespace tfm_kernels {

// bytes that hold, of every part, its type and value: of a tensor dtype, layout, device, shape and
// whether it needs a gradient. None where a part is of another kind (a subclass of Tensor, a list).
PyObject* signature(PyObject* module, PyObject* const* parts, Py_ssize_t count);

// The same of a call's arguments, for what depends on no more than they do but for the values of
// tensors: of a tensor dtype, device, shape, strides, where it begins within 16 bytes, and which
// tensor before it is the same one. Lists may be parts, too.
PyObject* launch_signature(PyObject* module, PyObject* const* parts, Py_ssize_t count);

}  // namespace tfm_kernels
