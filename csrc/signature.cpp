// signature(*parts): what a call's checks and the choice of its backend depend on, as bytes that
// can be looked up; launch_signature(*parts): what its launches depend on. In C++ because the same
// in Python costs as much as a small norm.
#include "signature.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <cstring>

#include "apply.h"

namespace tfm_kernels {
namespace {

using Words = c10::SmallVector<int64_t, 96>;
using Tensors = c10::SmallVector<const c10::TensorImpl*, 16>;

constexpr uintptr_t kRun = 16;  // bytes of one load; launches depend on where tensors begin in one

bool add_tensor(const at::Tensor& t, bool grad_mode, Tensors* seen, Words& words) {
  const c10::TensorImpl* impl = t.unsafeGetTensorImpl();
  if (!t.defined() || t.is_nested() || impl->has_symbolic_sizes_strides()) return false;
  const auto device = t.device();
  words.push_back('t' | static_cast<int64_t>(t.scalar_type()) << 8 |
                  static_cast<int64_t>(t.layout()) << 16 |
                  static_cast<int64_t>(grad_mode && t.requires_grad()) << 24 |
                  static_cast<int64_t>(device.type()) << 32 | t.dim() << 40);
  words.push_back(device.index());
  words.append(t.sizes().begin(), t.sizes().end());
  if (seen == nullptr) return true;
  if (t.layout() != at::kStrided) return false;
  words.append(t.strides().begin(), t.strides().end());
  words.push_back(static_cast<int64_t>(reinterpret_cast<uintptr_t>(t.const_data_ptr()) % kRun));
  words.push_back(std::find(seen->begin(), seen->end(), impl) - seen->begin());
  seen->push_back(impl);
  return true;
}

// Equal words mean an equal type and an equal value: True is not 1, and 0.0 is not 0. With `seen`,
// the tensors so far, they also mean an equal layout, and the same tensors at the same places.
bool add(PyObject* part, bool grad_mode, Tensors* seen, Words& words) {
  if (part == Py_None) {
    words.push_back('n');
  } else if (const at::Tensor* tensor = exact_tensor(part)) {
    return add_tensor(*tensor, grad_mode, seen, words);
  } else if (PyBool_Check(part)) {
    words.push_back('b' | static_cast<int64_t>(part == Py_True) << 8);
  } else if (PyLong_CheckExact(part)) {
    int overflow = 0;
    const long long value = PyLong_AsLongLongAndOverflow(part, &overflow);
    if (overflow != 0) return false;
    words.append({'i', static_cast<int64_t>(value)});
  } else if (PyFloat_CheckExact(part)) {
    const double value = PyFloat_AS_DOUBLE(part);
    int64_t bits = 0;
    std::memcpy(&bits, &value, sizeof(bits));
    words.append({'f', bits});
  } else if (PyUnicode_CheckExact(part)) {
    Py_ssize_t length = 0;
    const char* text = PyUnicode_AsUTF8AndSize(part, &length);
    if (text == nullptr) return PyErr_Clear(), false;
    words.push_back('s' | static_cast<int64_t>(length) << 8);
    for (Py_ssize_t i = 0; i < length; i += 8) {
      int64_t word = 0;
      std::memcpy(&word, text + i, std::min<Py_ssize_t>(8, length - i));
      words.push_back(word);
    }
  } else if (PyTuple_Check(part)) {
    const Py_ssize_t length = PyTuple_GET_SIZE(part);
    words.push_back('(' | static_cast<int64_t>(length) << 8);
    for (Py_ssize_t i = 0; i < length; ++i)
      if (!add(PyTuple_GET_ITEM(part, i), grad_mode, seen, words)) return false;
  } else if (seen != nullptr && PyList_CheckExact(part)) {
    const Py_ssize_t length = PyList_GET_SIZE(part);
    words.push_back('[' | static_cast<int64_t>(length) << 8);
    for (Py_ssize_t i = 0; i < length; ++i)
      if (!add(PyList_GET_ITEM(part, i), grad_mode, seen, words)) return false;
  } else {
    return false;
  }
  return true;
}

PyObject* bytes_of(PyObject* const* parts, Py_ssize_t count, bool grad_mode, Tensors* seen) {
  Words words;
  words.push_back(grad_mode);
  for (Py_ssize_t i = 0; i < count; ++i)
    if (!add(parts[i], grad_mode, seen, words)) Py_RETURN_NONE;
  return PyBytes_FromStringAndSize(reinterpret_cast<const char*>(words.data()),
                                   static_cast<Py_ssize_t>(words.size() * sizeof(int64_t)));
}

}  // namespace

PyObject* signature(PyObject* /*module*/, PyObject* const* parts, Py_ssize_t count) {
  // a transform of torch.func wraps tensors in tensors that look alike
  if (c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode))
    Py_RETURN_NONE;
  return bytes_of(parts, count, at::GradMode::is_enabled(), nullptr);
}

PyObject* launch_signature(PyObject* /*module*/, PyObject* const* parts, Py_ssize_t count) {
  Tensors seen;
  return bytes_of(parts, count, false, &seen);
}

}  // namespace tfm_kernels
