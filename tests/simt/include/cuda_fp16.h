// float16 for the host compiler; conversions round to nearest even.
#pragma once
#include "cuda_runtime.h"

struct __half {
  _Float16 value;
  __half() = default;
  explicit __half(float x) : value(static_cast<_Float16>(x)) {}
  // by bits: without F16C a cast is a call that costs more than a product
  operator float() const {
    uint16_t bits = 0;
    std::memcpy(&bits, &value, sizeof(bits));
    const uint32_t sign = uint32_t{bits & 0x8000u} << 16, rest = uint32_t{bits & 0x7fffu} << 13;
    uint32_t word = rest;
    float x = 0;
    std::memcpy(&x, &word, sizeof(x));
    x *= 0x1p112f;
    std::memcpy(&word, &x, sizeof(x));
    if ((bits & 0x7c00u) == 0x7c00u) word = rest | 0x7f800000u;
    word |= sign;
    std::memcpy(&x, &word, sizeof(x));
    return x;
  }
};

struct __half2 {
  __half x, y;
};

inline __half2 __floats2half2_rn(float x, float y) { return {__half(x), __half(y)}; }
inline float2 __half22float2(__half2 pair) { return {pair.x, pair.y}; }
