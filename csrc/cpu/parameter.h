// A norm's weight and bias as the kernels see them.
#pragma once
#include "vec.h"

namespace tfm_kernels {

// (N) of any storage type; data null where there is none.
struct Parameter {
  const void* data = nullptr;
  DType type = DType::f32;
};

// Its gradient; data null where it is not asked for.
struct ParameterGradient {
  void* data = nullptr;  // (N)
  DType type = DType::f32;
};

inline namespace CPU_CAPABILITY {
namespace {

// The n numbers of a parameter in the type that is computed in, null where there is none; `room` is
// where they lie if they are stored otherwise.
template <typename C>
const C* widened(const Parameter& parameter, int64_t n, C* room) {
  if (!parameter.data) return nullptr;
  return for_dtype(parameter.type, [&](auto zero) -> const C* {
    using P = decltype(zero);
    const P* stored = static_cast<const P*>(parameter.data);
    if constexpr (std::is_same_v<P, C>) {
      return stored;
    } else {
      if constexpr (std::is_same_v<compute_t<P>, C>)
        widen(stored, n, room);
      else
        std::transform(stored, stored + n, room, [](P value) { return static_cast<C>(value); });
      return room;
    }
  });
}

}  // namespace
}  // namespace CPU_CAPABILITY
}  // namespace tfm_kernels
