// Types of PTX as the host's, and choosing a function for one by its name.
#pragma once
#include <cmath>
#include <limits>
#include <string>

#include "machine.h"

namespace ptx {

inline float half_to_float(uint16_t bits) {
  return static_cast<float>(std::bit_cast<_Float16>(bits));
}
inline uint16_t float_to_half(float x) { return std::bit_cast<uint16_t>(static_cast<_Float16>(x)); }
inline float bfloat_to_float(uint16_t bits) { return std::bit_cast<float>(uint32_t{bits} << 16); }
inline uint16_t float_to_bfloat(float x) {
  const auto bits = std::bit_cast<uint32_t>(x);
  if (x != x) return 0x7fff;
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// float32, cut off.
inline float toward_zero(double x) {
  const auto near = static_cast<float>(x);
  return std::bit_cast<float>(std::bit_cast<uint32_t>(near) - (std::fabs(near) > std::fabs(x)));
}

// Subnormals become 0.
inline float flushed(float x) {
  return std::fabs(x) < std::numeric_limits<float>::min() ? std::copysign(0.0f, x) : x;
}

// f.template operator()<T>() for the integer type of this name; nullptr for another.
template <class F>
Run of_integer(const std::string& type, F f) {
  if (type == "s16") return f.template operator()<int16_t>();
  if (type == "s32") return f.template operator()<int32_t>();
  if (type == "s64") return f.template operator()<int64_t>();
  if (type == "u16" || type == "b16") return f.template operator()<uint16_t>();
  if (type == "u32" || type == "b32") return f.template operator()<uint32_t>();
  if (type == "u64" || type == "b64") return f.template operator()<uint64_t>();
  return nullptr;
}

// The same by width alone.
template <class F>
Run of_width(unsigned width, F f) {
  if (width == 2) return f.template operator()<uint16_t>();
  if (width == 4) return f.template operator()<uint32_t>();
  if (width == 8) return f.template operator()<uint64_t>();
  return nullptr;
}

template <class D, class A, class F>
void unary(Warp& w, const Instruction& i) {
  D* d = w.lane_values<D>(i.o[0]);
  const A* a = w.lane_values<A>(i.o[1]);
  w.each([=](unsigned l) { d[l] = F::of(a[l]); });
}

template <class D, class A, class F>
void binary(Warp& w, const Instruction& i) {
  D* d = w.lane_values<D>(i.o[0]);
  const A *a = w.lane_values<A>(i.o[1]), *b = w.lane_values<A>(i.o[2]);
  w.each([=](unsigned l) { d[l] = F::of(a[l], b[l]); });
}

template <class D, class A, class F>
void ternary(Warp& w, const Instruction& i) {
  D* d = w.lane_values<D>(i.o[0]);
  const A *a = w.lane_values<A>(i.o[1]), *b = w.lane_values<A>(i.o[2]);
  const A* c = w.lane_values<A>(i.o[3]);
  w.each([=](unsigned l) { d[l] = F::of(a[l], b[l], c[l]); });
}

// Operands of one width, as many as the statement has.
inline void take(const Statement& from, Names& names, Instruction& made, unsigned width) {
  for (size_t n = 0; n < from.operands.size(); ++n)
    made.o[n] = names.place(from.operands[n], width);
}

}  // namespace ptx
