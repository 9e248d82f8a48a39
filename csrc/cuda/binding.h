// What a binding needs of torch, through its stable ABI alone: one build serves torch 2.11 and
// later, with CUDA or without. A later torch's additions do not compile.
//
// The checks keep a direct call of torch.ops.tfm_kernels.* from reading outside its buffers; the
// public functions have checked before with better words.
#pragma once
#define TORCH_TARGET_VERSION 0x020b000000000000  // torch 2.11
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <optional>
#include <tuple>
#include <vector>

#include "launch.h"

#ifdef TFM_CPU_TENSORS  // tests: kernels that stand-ins for a GPU run
#include "cpu_tensors.h"
#else
#define TFM_REGISTER(name) \
  STABLE_TORCH_LIBRARY_IMPL(tfm_kernels, CUDA, m) { m.impl(#name, TORCH_BOX(&name)); }

// Lives in libtorch_cuda.so. Weak, so that this library also loads where torch is a CPU build.
extern "C" __attribute__((weak)) AOTITorchError
aoti_torch_get_current_cuda_stream(int32_t device_index, void** stream);
#endif

namespace tfm_kernels {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;
using Sizes = torch::headeronly::IntHeaderOnlyArrayRef;

inline ScalarType scalar_type(DType type) {
  return type == DType::f16    ? ScalarType::Half
         : type == DType::bf16 ? ScalarType::BFloat16
                               : ScalarType::Float;
}

inline DType dtype_of(const Tensor& t, const char* op, const char* name) {
  const ScalarType type = t.scalar_type();
  STD_TORCH_CHECK(
      type == ScalarType::Half || type == ScalarType::BFloat16 || type == ScalarType::Float, op,
      ": ", name, " must be float16, bfloat16 or float32, got ", torch::headeronly::toString(type));
  return type == ScalarType::Half       ? DType::f16
         : type == ScalarType::BFloat16 ? DType::bf16
                                        : DType::f32;
}

inline DType dtype_of(const OptionalTensor& t, const Tensor& otherwise, const char* op,
                      const char* name) {
  return dtype_of(t ? *t : otherwise, op, name);
}

inline DType promote(DType a, DType b) { return a == b ? a : DType::f32; }

// N, the last dimension, which must lie in 1..most.
inline int check_features(const Tensor& t, int most, const char* op, const char* name) {
  const int64_t n = t.dim() < 1 ? 0 : t.size(t.dim() - 1);
  STD_TORCH_CHECK(n >= 1 && n <= most, op, ": ", name, " must have 1 to ", most, " features, got ",
                  n);
  return static_cast<int>(n);
}

inline void check_like(const Tensor& t, const Tensor& like, Sizes sizes, const char* op,
                       const char* name) {
  STD_TORCH_CHECK(t.is_cuda() == like.is_cuda() && t.get_device_index() == like.get_device_index(),
                  op, ": ", name, " must be on the device of the other tensors");
  STD_TORCH_CHECK(std::equal(t.sizes().begin(), t.sizes().end(), sizes.begin(), sizes.end()), op,
                  ": ", name, " has the wrong shape");
}

inline void check_like(const OptionalTensor& t, const Tensor& like, Sizes sizes, const char* op,
                       const char* name) {
  if (t) check_like(*t, like, sizes, op, name);
}

// A tensor that has to have this very type.
inline void check_type(const OptionalTensor& t, ScalarType type, const char* op, const char* name) {
  STD_TORCH_CHECK(!t || t->scalar_type() == type, op, ": ", name, " must be ",
                  torch::headeronly::toString(type), ", got ",
                  torch::headeronly::toString(t->scalar_type()));
}

// What goes with tensors of `type` has this type or float32.
inline void check_beside(const OptionalTensor& t, DType type, const char* op, const char* name) {
  if (t && t->scalar_type() != ScalarType::Float) check_type(t, scalar_type(type), op, name);
}

// Makes the tensors' device the current one; the stream is torch's current one there.
struct Device {
  Stream stream = nullptr;
#ifdef TFM_CPU_TENSORS
  explicit Device(const Tensor&) {}
#else
  torch::stable::accelerator::DeviceGuard guard;
  explicit Device(const Tensor& like) : guard(like.get_device_index()) {
    STD_TORCH_CHECK(aoti_torch_get_current_cuda_stream != nullptr,
                    "this build of torch has no CUDA support");
    void* current = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(like.get_device_index(), &current));
    stream = static_cast<Stream>(current);
  }
#endif
};

inline void check_launch(const char* error, const char* op) {
  STD_TORCH_CHECK(error == nullptr, op, ": ", error);
}

#ifndef TFM_OWN_EMPTY
// An uninitialised contiguous tensor on the device of `like`. torch::stable::new_empty does the
// same through the dispatcher, half a microsecond slower.
inline Tensor empty(const Tensor& like, Sizes sizes, ScalarType type) {
  std::vector<int64_t> strides(sizes.size());
  int64_t stride = 1;
  for (size_t i = sizes.size(); i-- > 0; stride *= sizes[i]) strides[i] = stride;
  int32_t device_type = 0;
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &device_type));
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(
      static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(),
      torch::stable::detail::to<int32_t>(torch::stable::detail::from(type)), device_type,
      like.get_device_index(), &handle));
  return Tensor(handle);
}
#endif

// A tensor as rows of n elements with unit stride, copied only where its strides do not allow that.
struct Matrix {
  OptionalTensor owner;
  Rows rows;

  Matrix(const OptionalTensor& t, int n, const char* op) {
    if (!t) return;
    owner = t;
    if (!collapse(*t, n, &rows.stride)) {
      owner = torch::stable::contiguous(*t);
      rows.stride = n;
    }
    rows.data = owner->const_data_ptr();
    rows.type = dtype_of(*t, op, "an argument");
  }

 private:
  // Whether one stride leads from row to row.
  static bool collapse(const Tensor& t, int n, int64_t* stride) {
    const int64_t last = t.dim() - 1;
    if (n > 1 && t.stride(last) != 1) return false;
    bool found = false;
    int64_t next = 0;  // what an outer dimension's stride must be
    for (int64_t d = last; d-- > 0;) {
      if (t.size(d) == 1) continue;
      if (found && t.stride(d) != next) return false;
      if (!found) *stride = t.stride(d);
      found = true;
      next = t.stride(d) * t.size(d);
    }
    return true;
  }
};

// Whether every row of all matrices starts at a whole pack: 16 bytes of `type`, or as many elements
// of another type, of which 16 bytes are loaded at most.
inline bool aligned(int n, DType type, std::initializer_list<Rows> all) {
  const int lanes = 16 / kItemSize[static_cast<int>(type)];
  if (n % lanes != 0) return false;
  for (const Rows& rows : all) {
    const int size = kItemSize[static_cast<int>(rows.type)];
    const int64_t bytes = std::min(16, lanes * size);
    if (reinterpret_cast<uintptr_t>(rows.data) % bytes != 0) return false;
    if (rows.stride * size % bytes != 0) return false;
  }
  return true;
}

// The dropout rule of a call, and the row numbers it points to.
struct DropoutRule {
  OptionalTensor owner;
  Dropout dropout;

  DropoutRule(double p, const OptionalTensor& seed, const OptionalTensor& numbers,
              const Tensor& like, int64_t count, const char* op) {
    STD_TORCH_CHECK(p >= 0.0 && p <= 1.0, op, ": dropout_p must lie in [0, 1], got ", p);
    check_like(numbers, like, {count}, op, "dropout_rows");
    check_type(numbers, ScalarType::Long, op, "dropout_rows");
    check_type(seed, ScalarType::Long, op, "seed");
    if (p == 0.0) return;
    STD_TORCH_CHECK(seed && seed->numel() == 1, op,
                    ": seed must be an int64 tensor of one element where dropout_p > 0");
    check_like(seed, like, seed->sizes(), op, "seed");
    dropout.seed = static_cast<const int64_t*>(seed->const_data_ptr());
    if (numbers) {
      owner = torch::stable::contiguous(*numbers);
      dropout.rows = static_cast<const int64_t*>(owner->const_data_ptr());
    }
    dropout.last_dropped = static_cast<uint32_t>(std::ceil(p * 4294967296.0) - 1.0);
    dropout.scale = p < 1.0 ? static_cast<float>(1.0 / (1.0 - p)) : 0.0f;
  }
};

}  // namespace tfm_kernels
