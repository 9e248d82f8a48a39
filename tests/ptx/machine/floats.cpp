// Floating point. Sums and products round as IEEE 754 has it; what the PTX manual calls approximate
// is off by the most that it allows, up or down by the bits of its operand.
#include <algorithm>

#include "types.h"

namespace ptx {
namespace {

template <bool kFlush>
float in(float x) {
  return kFlush ? flushed(x) : x;
}

uint32_t scrambled(float operand) {
  uint32_t h = std::bit_cast<uint32_t>(operand) * 2654435761u;
  h = (h ^ h >> 15) * 2246822519u;
  return h ^ h >> 13;
}

// The exact result, wrong by a share of itself (relative) or an amount.
float inexact(double exact, float operand, double relative, double absolute = 0) {
  if (!std::isfinite(exact) || exact == 0) return static_cast<float>(exact);
  const double error = std::max(std::fabs(exact) * relative, absolute);
  return static_cast<float>(scrambled(operand) & 1 ? exact + error : exact - error);
}

template <bool kFlush>
struct FAdd {
  static float of(float a, float b) { return in<kFlush>(in<kFlush>(a) + in<kFlush>(b)); }
};
template <bool kFlush>
struct FSub {
  static float of(float a, float b) { return in<kFlush>(in<kFlush>(a) - in<kFlush>(b)); }
};
template <bool kFlush>
struct FMul {
  static float of(float a, float b) { return in<kFlush>(in<kFlush>(a) * in<kFlush>(b)); }
};
template <bool kFlush>
struct FFma {
  static float of(float a, float b, float c) {
    return in<kFlush>(std::fma(in<kFlush>(a), in<kFlush>(b), in<kFlush>(c)));
  }
};
struct FFmaDown {  // toward minus infinity; __float128 has room for all that a range of exp needs
  static float of(float a, float b, float c) {
    const float near = std::fma(a, b, c);
    const __float128 exact = static_cast<__float128>(a) * b + c;
    return std::isfinite(near) && near > exact
               ? std::nextafter(near, -std::numeric_limits<float>::infinity())
               : near;
  }
};
template <bool kFlush>
struct FDiv {
  static float of(float a, float b) { return in<kFlush>(in<kFlush>(a) / in<kFlush>(b)); }
};
template <bool kFlush>
struct FDivFull {  // 2 ulp
  static float of(float a, float b) {
    const float fa = in<kFlush>(a), fb = in<kFlush>(b);
    return in<kFlush>(inexact(static_cast<double>(fa) / fb, a + b, 0x1p-23));
  }
};
template <bool kMost, bool kNan, bool kFlush>
struct FExtreme {
  static float of(float a, float b) {
    a = in<kFlush>(a), b = in<kFlush>(b);
    if (a != a || b != b) {
      if (kNan || (a != a && b != b)) return std::numeric_limits<float>::quiet_NaN();
      return a != a ? b : a;
    }
    if (a == 0 && b == 0) return std::signbit(a) == kMost ? b : a;
    return (a < b) == kMost ? b : a;
  }
};
template <bool kFlush>
struct FNeg {
  static float of(float a) { return -in<kFlush>(a); }
};
template <bool kFlush>
struct FAbs {
  static float of(float a) { return std::fabs(in<kFlush>(a)); }
};
template <bool kFlush>
struct FSqrt {
  static float of(float a) { return in<kFlush>(std::sqrt(in<kFlush>(a))); }
};
template <bool kFlush>
struct FSqrtApprox {
  static float of(float a) {
    return in<kFlush>(inexact(std::sqrt(double{in<kFlush>(a)}), a, 0x1p-23));
  }
};
template <bool kFlush>
struct FRsqrt {  // 2^-22.9
  static float of(float a) {
    const float x = in<kFlush>(a);
    if (x == 0) return std::copysign(std::numeric_limits<float>::infinity(), x);
    return in<kFlush>(inexact(1 / std::sqrt(double{x}), a, 0x1.1p-23));
  }
};
template <bool kFlush>
struct FRcp {
  static float of(float a) { return in<kFlush>(1 / in<kFlush>(a)); }
};
template <bool kFlush>
struct FRcpApprox {  // 1 ulp
  static float of(float a) { return in<kFlush>(inexact(1.0 / in<kFlush>(a), a, 0x1p-23)); }
};
template <bool kFlush>
struct FExp2 {  // 2^-22 at most: scattered below that, because a norm of errors all as large is no
                // unit's
  static float of(float a) {
    const float x = in<kFlush>(a);
    return x == 0 ? 1.0f : in<kFlush>(inexact(std::exp2(double{x}), a, scrambled(-x) * 0x1p-54));
  }
};
template <bool kFlush>
struct FLog2 {  // 2^-22 of 1 around 1, of itself elsewhere
  static float of(float a) {
    const float x = in<kFlush>(a);
    const double exact = std::log2(double{x});
    return x == 1 ? 0.0f
                  : inexact(exact, a, x > 0.5f && x < 2 ? 0 : 0x1p-22,
                            x > 0.5f && x < 2 ? 0x1p-22 : 0);
  }
};
template <bool kFlush>
struct FTanh {  // 2^-11
  static float of(float a) { return inexact(std::tanh(double{in<kFlush>(a)}), a, 0x1p-11); }
};
struct FCopySign {  // of the first operand, to the second
  static float of(float a, float b) { return std::copysign(b, a); }
};

template <class F>
struct TwoFloats {  // in a register of 64 bits
  template <class... T>
  static uint64_t of(T... x) {
    const float upper = F::of(std::bit_cast<float>(static_cast<uint32_t>(x >> 32))...);
    const float lower = F::of(std::bit_cast<float>(static_cast<uint32_t>(x))...);
    return uint64_t{std::bit_cast<uint32_t>(upper)} << 32 | std::bit_cast<uint32_t>(lower);
  }
};

template <bool kFlush>
Run of_two_floats(const std::string& name) {
  if (name == "add") return binary<uint64_t, uint64_t, TwoFloats<FAdd<kFlush>>>;
  if (name == "sub") return binary<uint64_t, uint64_t, TwoFloats<FSub<kFlush>>>;
  if (name == "mul") return binary<uint64_t, uint64_t, TwoFloats<FMul<kFlush>>>;
  return name == "fma" ? ternary<uint64_t, uint64_t, TwoFloats<FFma<kFlush>>> : nullptr;
}

template <bool kFlush>
Run float_function(const Statement& from) {
  const std::string& name = from.parts[0];
  const bool approximate = from.has("approx");
  if (name == "add") return binary<float, float, FAdd<kFlush>>;
  if (name == "sub") return binary<float, float, FSub<kFlush>>;
  if (name == "mul") return binary<float, float, FMul<kFlush>>;
  if (from.has("rm")) return name == "fma" && !kFlush ? ternary<float, float, FFmaDown> : nullptr;
  if (name == "fma" || name == "mad") return ternary<float, float, FFma<kFlush>>;
  if (name == "div" && from.has("rn")) return binary<float, float, FDiv<kFlush>>;
  if (name == "div") return binary<float, float, FDivFull<kFlush>>;
  if (name == "min" && from.has("NaN")) return binary<float, float, FExtreme<false, true, kFlush>>;
  if (name == "min") return binary<float, float, FExtreme<false, false, kFlush>>;
  if (name == "max" && from.has("NaN")) return binary<float, float, FExtreme<true, true, kFlush>>;
  if (name == "max") return binary<float, float, FExtreme<true, false, kFlush>>;
  if (name == "neg") return unary<float, float, FNeg<kFlush>>;
  if (name == "abs") return unary<float, float, FAbs<kFlush>>;
  if (name == "sqrt")
    return approximate ? unary<float, float, FSqrtApprox<kFlush>>
                       : unary<float, float, FSqrt<kFlush>>;
  if (name == "rsqrt") return unary<float, float, FRsqrt<kFlush>>;
  if (name == "rcp")
    return approximate ? unary<float, float, FRcpApprox<kFlush>>
                       : unary<float, float, FRcp<kFlush>>;
  if (name == "ex2") return unary<float, float, FExp2<kFlush>>;
  if (name == "lg2") return unary<float, float, FLog2<kFlush>>;
  if (name == "tanh") return unary<float, float, FTanh<kFlush>>;
  if (name == "copysign") return binary<float, float, FCopySign>;
  return nullptr;
}

// Functions of 16 bits, formed in float32 and rounded: as if rounded once, because float32 has more
// than twice the bits.
template <float (*kWiden)(uint16_t), uint16_t (*kNarrow)(float), char kWhat>
struct Short {
  static uint16_t of(uint16_t a, uint16_t b) {
    const float x = kWiden(a), y = kWiden(b);
    switch (kWhat) {
      case '+':
        return kNarrow(x + y);
      case '-':
        return kNarrow(x - y);
      case '*':
        return kNarrow(x * y);
      case '<':
        return kNarrow(FExtreme<false, false, false>::of(x, y));
      default:
        return kNarrow(FExtreme<true, false, false>::of(x, y));
    }
  }
};

template <class F>
struct Pair {
  template <class... T>
  static uint32_t of(T... x) {
    const uint32_t upper = F::of(static_cast<uint16_t>(x >> 16)...);
    return upper << 16 | F::of(static_cast<uint16_t>(x)...);
  }
};

// float32 that no second rounding can spoil: cut off, with the last bit set where something was.
float to_odd(double x) {
  const auto near = static_cast<float>(x);
  if (!std::isfinite(near) || near == x) return near;
  return std::bit_cast<float>(std::bit_cast<uint32_t>(toward_zero(x)) | 1);
}

template <float (*kWiden)(uint16_t), uint16_t (*kNarrow)(float)>
struct ShortFma {
  static uint16_t of(uint16_t a, uint16_t b, uint16_t c) {
    return kNarrow(to_odd(static_cast<double>(kWiden(a)) * kWiden(b) + kWiden(c)));
  }
};

template <float (*kWiden)(uint16_t), uint16_t (*kNarrow)(float)>
Run short_function(const std::string& name, bool pair) {
  using Fma = ShortFma<kWiden, kNarrow>;
  if (name == "fma" && pair) return ternary<uint32_t, uint32_t, Pair<Fma>>;
  if (name == "fma") return ternary<uint16_t, uint16_t, Fma>;
  const auto made = [&]<char kWhat>() -> Run {
    using F = Short<kWiden, kNarrow, kWhat>;
    return pair ? binary<uint32_t, uint32_t, Pair<F>> : binary<uint16_t, uint16_t, F>;
  };
  if (name == "add") return made.template operator()<'+'>();
  if (name == "sub") return made.template operator()<'-'>();
  if (name == "mul") return made.template operator()<'*'>();
  if (name == "min") return made.template operator()<'<'>();
  if (name == "max") return made.template operator()<'>'>();
  return nullptr;
}

void clear_signs(Warp& w, const Instruction& i) {  // abs of two in a register
  uint32_t* d = w.lane_values<uint32_t>(i.o[0]);
  const uint32_t* a = w.lane_values<uint32_t>(i.o[1]);
  w.each([=](unsigned l) { d[l] = a[l] & 0x7fff7fff; });
}

void clear_sign(Warp& w, const Instruction& i) {
  uint16_t* d = w.lane_values<uint16_t>(i.o[0]);
  const uint16_t* a = w.lane_values<uint16_t>(i.o[1]);
  w.each([=](unsigned l) { d[l] = a[l] & 0x7fff; });
}

}  // namespace

bool decode_floats(const Statement& from, Names& names, Instruction& made) {
  const std::string &name = from.parts[0], &type = from.parts.back();
  if (type == "f32")
    made.run = from.has("ftz") ? float_function<true>(from) : float_function<false>(from);
  if (type == "f32x2")
    made.run = from.has("ftz") ? of_two_floats<true>(name) : of_two_floats<false>(name);
  const bool pair = type == "bf16x2" || type == "f16x2",
             plain = !from.has("ftz") && !from.has("NaN");
  if (plain && type.rfind("bf16", 0) == 0)
    made.run = short_function<bfloat_to_float, float_to_bfloat>(name, pair);
  if (plain && type.rfind("f16", 0) == 0)
    made.run = short_function<half_to_float, float_to_half>(name, pair);
  if (name == "abs" && pair) made.run = clear_signs;
  if (name == "abs" && (type == "bf16" || type == "f16")) made.run = clear_sign;
  if (made.run == nullptr || from.parts[0] == "cvt") {
    made.run = nullptr;
    return false;
  }
  take(from, names, made, width_of(type));
  return true;
}

}  // namespace ptx
