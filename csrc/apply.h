// The Python functions _C.plan and _C.apply, for module.cpp: a fused call with its place in
// autograd's graph.
#pragma once
#include <Python.h>

#include <array>
#include <cstdint>
#include <string>
#include <vector>

namespace at {
class Tensor;
}  // namespace at

namespace tfm_kernels {

// What _autograd.Rule read off the schemas of an op's forward and backward operators; see there.
struct Plan {
  std::string forward, backward;                // qualified names; no backward: no gradients
  std::vector<std::array<int64_t, 2>> sources;  // of each argument of the backward: (kind, index)
  std::vector<std::array<int64_t, 2>> targets;  // of each of its results: (argument, shared or -1)
  std::vector<std::array<int64_t, 3>> absent;   // (output, argument, argument that stands for it)
  std::vector<int64_t> differentiable;          // outputs, those with a gradient
  int64_t like = -1;  // argument of the backward that a first gradient of zeros is like, or -1
};

// Makes a plan known; returns its number.
int64_t add_plan(Plan plan);

// apply(number, *arguments): the forward operator's output, or a tuple of them; with a node in the
// graph where a gradient is needed. NotImplemented for what is not plain: a subclass of Tensor, an
// argument of an unexpected type, an active mode; torch.library's own way takes those.
PyObject* apply(PyObject* module, PyObject* const* parts, Py_ssize_t count);

// shaped_like(y, x): y (M, N), what apply() returned, with the leading axes of x (..., K), whose
// rows it was made of. No view that autograd keeps track of unless there is a graph, so that it may
// be written into: PyTorch's own operators return none either. NotImplemented as above.
PyObject* shaped_like(PyObject* module, PyObject* const* parts, Py_ssize_t count);

// The tensor that a Python object is; null for anything else, a subclass of Tensor among it. Here
// because the header that knows costs ten seconds of compile time.
const at::Tensor* exact_tensor(PyObject* part);

}  // namespace tfm_kernels
