// rotary_fwd, CPU. Implements ROTARY.1 of tfm_kernels/ops/rotary.py, and for rotary_bwd ROTARY.2.
// Owns:    one task = a range of positions; a position's factors stay in L1 for all its heads.
// Traffic: reads x and writes y once; cos and sin once.
// Limits:  none; float64 computes in float64, everything else in float32.
// Source:  own work.
#include "rotary.h"

namespace tfm_kernels {
inline namespace CPU_CAPABILITY {
namespace {

// The factors of one position: y_i = x_i a_i + x_j b_i for the pairs (i, j), either way.
template <typename C>
struct Factors {
  const C *own, *other;
};

// How far the other feature of a pair lies from the first one, and the next pair.
struct Pairs {
  int64_t count, apart, next;
};

template <typename C>
Factors<C> factors(const Rotary& args, const Pairs& pairs, int64_t batch, int64_t t, C* room) {
  const int64_t n = args.turned;
  const int64_t at = batch * args.angle_stride[0] + t * args.angle_stride[1];
  const auto row = [&](const void* from) {
    return for_dtype(args.angle_type, [&](auto zero) {
      return Parameter{static_cast<const decltype(zero)*>(from) + at, args.angle_type};
    });
  };
  const C* cos = widened(row(args.cos), n, room);
  const C* sin = widened(row(args.sin), n, room + n);
  C* other = room + 2 * n;
  for (int64_t pair = 0; pair < pairs.count; ++pair) {
    const int64_t i = pair * pairs.next, j = i + pairs.apart;
    other[i] = args.back ? sin[j] : -sin[i];
    other[j] = args.back ? -sin[i] : sin[j];
  }
  return {cos, other};
}

template <typename T, typename C>
void turn(const T* x, const Factors<C>& by, const Pairs& pairs, T* y) {
  if (pairs.apart == 1) {
    for (int64_t i = 0; i < 2 * pairs.count; i += 2) {
      const C first = static_cast<C>(x[i]), second = static_cast<C>(x[i + 1]);
      y[i] = static_cast<T>(first * by.own[i] + second * by.other[i]);
      y[i + 1] = static_cast<T>(second * by.own[i + 1] + first * by.other[i + 1]);
    }
    return;
  }
  const int64_t half = pairs.apart;
  for_lanes<T>(half, [&]<typename V>(int64_t i) {
    const V first = load<V>(x + i), second = load<V>(x + half + i);
    store(y + i, first * load<V>(by.own + i) + second * load<V>(by.other + i));
    store(y + half + i, second * load<V>(by.own + half + i) + first * load<V>(by.other + half + i));
  });
}

template <typename T>
void positions(const Rotary& args, int64_t begin, int64_t end, compute_t<T>* scratch) {
  const int64_t half = args.turned / 2;
  const Pairs pairs = args.interleaved ? Pairs{half, 1, 2} : Pairs{half, half, 1};
  for (int64_t position = begin; position < end; ++position) {
    const int64_t batch = position / args.length, t = position % args.length;
    const auto by = factors(args, pairs, batch, t, scratch);
    const T* x = static_cast<const T*>(args.x) + batch * args.x_stride[0] + t * args.x_stride[2];
    T* y = static_cast<T*>(args.y) + batch * args.y_stride[0] + t * args.y_stride[2];
    for (int64_t head = 0; head < args.heads; ++head) {
      turn(x, by, pairs, y);
      std::copy(x + args.turned, x + args.width, y + args.turned);
      x += args.x_stride[1];
      y += args.y_stride[1];
    }
  }
}

}  // namespace

void rotary(const Rotary& args, DType dtype, int64_t begin, int64_t end, void* scratch) {
  for_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    positions<T>(args, begin, end, static_cast<compute_t<T>*>(scratch));
  });
}

}  // namespace CPU_CAPABILITY
}  // namespace tfm_kernels

#ifdef CPU_CAPABILITY_DEFAULT
#include <ATen/Parallel.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

namespace tfm_kernels {

at::Tensor turned(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin,
                  bool interleaved, bool back, const char* op, const char* name) {
  check_floating(x, op, name);
  check_floating(cos, op, "cos");
  TORCH_CHECK(x.dim() == 4, op, ": ", name, " must have shape (B, H, T, D), got ", x.sizes());
  const int64_t batch = x.size(0), length = x.size(2), width = x.size(3);
  const int64_t lead = cos.dim() == 3 ? cos.size(0) : 1;
  TORCH_CHECK((cos.dim() == 2 || (cos.dim() == 3 && (lead == 1 || lead == batch))) &&
                  cos.size(-2) == length && cos.size(-1) % 2 == 0 && cos.size(-1) <= width,
              op, ": cos must have shape (", length, ", R), R even and at most ", width, ", got ",
              cos.sizes());
  check_shape(sin, cos.sizes(), op, "sin");
  TORCH_CHECK(cos.scalar_type() == sin.scalar_type(), op, ": cos and sin must have one dtype");
  const auto sided = [](const at::Tensor& t) {
    return t.size(-1) <= 1 || t.stride(-1) == 1 ? t : t.contiguous();
  };
  const at::Tensor from = sided(x), c = sided(cos), s = sided(sin);
  at::Tensor y = at::empty_like(x);
  if (y.numel() == 0) return y;
  const bool apart = width > 1 && y.stride(3) != 1;  // x is dense in an order of its own
  at::Tensor to = apart ? at::empty(x.sizes(), x.options()) : y;

  Rotary args{};
  args.x = from.const_data_ptr();
  args.y = to.mutable_data_ptr();
  for (int64_t i = 0; i < 3; ++i) {
    args.x_stride[i] = from.stride(i);
    args.y_stride[i] = to.stride(i);
  }
  const bool same = c.strides() == s.strides();
  const at::Tensor c2 = same ? c : c.contiguous(), s2 = same ? s : s.contiguous();
  args.cos = c2.const_data_ptr();
  args.sin = s2.const_data_ptr();
  args.angle_type = dtype_of(c2.scalar_type());
  args.angle_stride[0] = lead > 1 ? c2.stride(0) : 0;
  args.angle_stride[1] = c2.stride(-2);
  args.heads = x.size(1);
  args.length = length;
  args.width = width;
  args.turned = cos.size(-1);
  args.interleaved = interleaved;
  args.back = back;
  const int64_t item = compute_type(x.scalar_type()) == at::kDouble ? 8 : 4;
  const int64_t grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(1, args.heads * width));
  at::parallel_for(0, batch * length, grain, [&](int64_t begin, int64_t end) {
    WideRows scratch(3 * args.turned * item);
    TFM_KERNEL(rotary)(args, dtype_of(x.scalar_type()), begin, end, scratch.data);
  });
  if (apart) y.copy_(to);
  return y;
}

namespace {

at::Tensor rotary_fwd_cpu(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin,
                          bool interleaved) {
  return turned(x, cos, sin, interleaved, false, "rotary_fwd_cpu", "x");
}

TORCH_LIBRARY_IMPL(tfm_kernels, CPU, m) { m.impl("rotary_fwd_cpu", &rotary_fwd_cpu); }

}  // namespace
}  // namespace tfm_kernels
#endif
