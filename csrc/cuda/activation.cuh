// The activations of ffn and their slopes, FFN.3 and FFN.6 of tfm_kernels/ops/ffn.py, on packs.
//
// float32 in and out. Errors are a few units of 1, not of the result: 0.5 (1 + erf(p)) far below 0
// keeps its absolute precision, as PyTorch's own does. An inf or NaN gives what the formula gives.
#pragma once
#include "pack.cuh"

namespace tfm_kernels {

// The order of ACTIVATIONS in tfm_kernels/ops/ffn_call.py, whose index the operators take.
enum class Activation : int { relu, gelu, gelu_tanh, silu };

__device__ inline float sigmoid(float p) { return 1.0f / (1.0f + expf(-p)); }
__device__ inline float normal_area(float p) { return 0.5f + 0.5f * erff(p * 0.70710678f); }

// 2 sqrt(2 / pi) (p + 0.044715 p^3): 0.5 (1 + tanh(u)) = sigmoid(2 u).
__device__ inline float twice_u(float p) { return p * (1.5957691216f + 0.0713548163f * p * p); }

// act(p) in the place of p.
template <int lanes>
__device__ inline void activate(Activation activation, float (&p)[1][lanes]) {
  switch (activation) {
    case Activation::relu:
      return fill(p, [&](int k, int i) { return p[k][i] < 0.0f ? 0.0f : p[k][i]; });
    case Activation::gelu:
      return fill(p, [&](int k, int i) { return p[k][i] * normal_area(p[k][i]); });
    case Activation::gelu_tanh:
      return fill(p, [&](int k, int i) { return p[k][i] * sigmoid(twice_u(p[k][i])); });
    case Activation::silu:
      return fill(p, [&](int k, int i) { return p[k][i] * sigmoid(p[k][i]); });
  }
}

// act(p) in the place of p, and act'(p).
template <int lanes>
__device__ inline void activate(Activation activation, float (&p)[1][lanes],
                                float (&slope)[1][lanes]) {
  switch (activation) {
    case Activation::relu:
      fill(slope, [&](int k, int i) { return p[k][i] <= 0.0f ? 0.0f : 1.0f; });
      return activate(activation, p);
    case Activation::gelu:
      return fill(p, [&](int k, int i) {
        const float x = p[k][i], area = normal_area(x);
        slope[k][i] = area + x * (0.3989422804f * expf(-0.5f * x * x));
        return x * area;
      });
    case Activation::gelu_tanh:
      return fill(p, [&](int k, int i) {
        const float x = p[k][i], area = sigmoid(twice_u(x)), rest = area * (1.0f - area);
        const float square = rest == 0.0f ? 0.0f : x * x;  // far out the cubic may have overflowed
        slope[k][i] = area + x * rest * (1.5957691216f + 0.2140644488f * square);
        return x * area;
      });
    case Activation::silu:
      return fill(p, [&](int k, int i) {
        const float x = p[k][i], area = sigmoid(x);
        slope[k][i] = area + x * (area * (1.0f - area));
        return x * area;
      });
  }
}

}  // namespace tfm_kernels
