// float16 for the host compiler; conversions round to nearest even.
#pragma once
#include "cuda_runtime.h"

struct __half {
  _Float16 value;
  __half() = default;
  explicit __half(float x) : value(static_cast<_Float16>(x)) {}
  operator float() const { return static_cast<float>(value); }
};

struct __half2 {
  __half x, y;
};

inline __half2 __floats2half2_rn(float x, float y) { return {__half(x), __half(y)}; }
inline float2 __half22float2(__half2 pair) { return {pair.x, pair.y}; }
