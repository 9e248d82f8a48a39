// The activations of ffn and their slopes, FFN.3 and FFN.6 of tfm_kernels/ops/ffn.py.
//
// Written as branch-free scalar code, which the compiler turns into vector code of any width inside
// a loop marked
// `#pragma omp simd` (once inlined: gcc must be told to, or it calls them). In float: exp to 1 ulp,
// the normal distribution's tail to 4 ulp of its own value, however small. An inf or NaN gives what
// the formula gives in IEEE arithmetic.
#pragma once
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

namespace tfm_kernels {

enum class Activation { relu, gelu, gelu_tanh, silu };

inline namespace CPU_CAPABILITY {
namespace {

// e^(a + b) for |b| < 0.01: the rest of an argument that float could not hold is added after the
// range reduction.
[[gnu::always_inline]] inline float exp_sum(float a, float b) {
  const float shifted =
      a * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: the low bits now hold round(a / ln 2)
  const float n = shifted - 12582912.0f;
  const float r = (a - n * 0.693359375f) + n * 2.12194440e-4f + b;
  float p = 1.3814391e-3f;
  p = p * r + 8.3688028e-3f;
  p = p * r + 4.1668397e-2f;
  p = p * r + 1.6666520e-1f;
  p = p * r + 0.49999993f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  const float scale = std::bit_cast<float>((std::bit_cast<uint32_t>(shifted) << 23) + 0x3F800000u);
  const float e = p * scale;
  const float low = a < -87.0f ? 0.0f : e;
  return a > 88.3f ? std::numeric_limits<float>::infinity() : low;
}

inline double exp_sum(double a, double b) { return std::exp(a + b); }

// 1 / (1 + e^-p)
template <typename C>
[[gnu::always_inline]] inline C sigmoid(C p) {
  return C(1) / (C(1) + exp_sum(-p, C(0)));
}

// The standard normal's distribution function at p; e^(-p^2 / 2) in `bell`.
[[gnu::always_inline]] inline float normal(float p, float& bell) {
  const float magnitude = std::fabs(p);
  const float a = magnitude > 14.0f ? 14.0f : magnitude;  // e^-98 is 0 already
  // a^2 = high^2 + (a - high)(a + high), the first exact, so that the tail's relative error does
  // not grow with a^2
  const float high = std::bit_cast<float>(std::bit_cast<uint32_t>(a) & 0xFFFFF000u);
  bell = exp_sum(-0.5f * high * high, -0.5f * ((a - high) * (a + high)));
  // tail / bell = 0.5 erfc(a / sqrt(2)) e^(a^2 / 2), minimax to 1.2e-8 on [0, 14.5]
  const float t = 1.0f / (1.0f + 0.33f * a);
  float q = -2.5829562e-2f;
  q = q * t + 1.4838484e-1f;
  q = q * t - 3.2195073e-1f;
  q = q * t + 2.9124972e-1f;
  q = q * t - 1.0657978e-1f;
  q = q * t + 1.4583929e-1f;
  q = q * t + 1.0372131e-1f;
  q = q * t + 1.3368000e-1f;
  q = q * t + 1.3147859e-1f;
  q = q * t + 6.3396433e-6f;
  const float tail = q * bell;
  // selects constants, not results: gcc vectorises no branch around arithmetic that might trap
  const float base = p > 0.0f ? 1.0f : 0.0f, sign = p > 0.0f ? -1.0f : 1.0f;
  return base + sign * tail;
}

inline double normal(double p, double& bell) {
  bell = std::exp(-0.5 * p * p);
  return 0.5 * std::erfc(-p * 0.70710678118654752440);
}

struct Relu {
  template <typename C>
  [[gnu::always_inline]] static C value(C p) {
    return p < C(0) ? C(0) : p;
  }
  // act(p), and act'(p) in `slope`
  template <typename C>
  [[gnu::always_inline]] static C value(C p, C& slope) {
    slope = p <= C(0) ? C(0) : C(1);
    return value(p);
  }
};

struct Gelu {
  template <typename C>
  [[gnu::always_inline]] static C value(C p) {
    C bell;
    return p * normal(p, bell);
  }
  template <typename C>
  [[gnu::always_inline]] static C value(C p, C& slope) {
    C bell;
    const C area = normal(p, bell);
    slope = area + p * (bell * C(0.39894228040143267794));
    return p * area;
  }
};

// 0.5 (1 + tanh(u)) = sigmoid(2u), which keeps its relative precision where tanh(u) is near -1.
struct GeluTanh {
  template <typename C>
  static C twice_u(C p) {
    return p * (C(1.59576912160573071176) + C(0.07135481627260025) * p * p);
  }
  template <typename C>
  [[gnu::always_inline]] static C value(C p) {
    return p * sigmoid(twice_u(p));
  }
  template <typename C>
  [[gnu::always_inline]] static C value(C p, C& slope) {
    const C s = sigmoid(twice_u(p));
    const C rest = s * (C(1) - s);  // 0 far out, where the cubic may have overflowed
    const C square = rest == C(0) ? C(0) : p * p;
    slope = s + p * rest * (C(1.59576912160573071176) + C(0.21406444881780075) * square);
    return p * s;
  }
};

struct Silu {
  template <typename C>
  [[gnu::always_inline]] static C value(C p) {
    return p * sigmoid(p);
  }
  template <typename C>
  [[gnu::always_inline]] static C value(C p, C& slope) {
    const C s = sigmoid(p);
    slope = s + p * (s * (C(1) - s));
    return p * s;
  }
};

// Calls `body` with an instance of the activation.
template <typename Body>
void for_activation(Activation activation, Body&& body) {
  switch (activation) {
    case Activation::relu:
      return body(Relu{});
    case Activation::gelu:
      return body(Gelu{});
    case Activation::gelu_tanh:
      return body(GeluTanh{});
    case Activation::silu:
      return body(Silu{});
  }
}

}  // namespace
}  // namespace CPU_CAPABILITY
}  // namespace tfm_kernels
