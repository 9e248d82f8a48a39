// bfloat16 for the host compiler; conversions round to nearest even.
#pragma once
#include "cuda_runtime.h"

struct __nv_bfloat16 {
  uint16_t bits;
  __nv_bfloat16() = default;
  explicit __nv_bfloat16(float x) {
    uint32_t word = 0;
    std::memcpy(&word, &x, sizeof(word));
    if (x != x)
      word = 0x7fff0000;
    else
      word += 0x7fff + (word >> 16 & 1);
    bits = static_cast<uint16_t>(word >> 16);
  }
  operator float() const {
    const uint32_t word = static_cast<uint32_t>(bits) << 16;
    float x = 0;
    std::memcpy(&x, &word, sizeof(x));
    return x;
  }
};

struct __nv_bfloat162 {
  __nv_bfloat16 x, y;
};

inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) {
  return {__nv_bfloat16(x), __nv_bfloat16(y)};
}
inline float2 __bfloat1622float2(__nv_bfloat162 pair) { return {pair.x, pair.y}; }
