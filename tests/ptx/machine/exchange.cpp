// Conversions between types, and what lanes of a warp say to one another.
#include <algorithm>

#include "types.h"

namespace ptx {
namespace {

struct Bfloat {};
struct Half {};

template <class T>
double wide_value(uint64_t bits) {
  if constexpr (std::is_same_v<T, Bfloat>)
    return bfloat_to_float(static_cast<uint16_t>(bits));
  else if constexpr (std::is_same_v<T, Half>)
    return half_to_float(static_cast<uint16_t>(bits));
  else if constexpr (std::is_same_v<T, float>)
    return std::bit_cast<float>(static_cast<uint32_t>(bits));
  else
    return std::bit_cast<double>(bits);
}

template <class T>
constexpr bool kIsInteger = std::is_integral_v<T>;

template <class D>
uint64_t float_bits(double x) {  // rounds to nearest even once: a double holds every source exactly
  if constexpr (std::is_same_v<D, Bfloat>)
    return float_to_bfloat(static_cast<float>(x));
  else if constexpr (std::is_same_v<D, Half>)
    return std::bit_cast<uint16_t>(static_cast<_Float16>(x));
  else if constexpr (std::is_same_v<D, float>)
    return std::bit_cast<uint32_t>(static_cast<float>(x));
  else
    return std::bit_cast<uint64_t>(x);
}

template <class D>
uint64_t integer_bits(double x, char rounding) {
  if (x != x) return 0;
  x = rounding == 'z'   ? std::trunc(x)
      : rounding == 'm' ? std::floor(x)
      : rounding == 'p' ? std::ceil(x)
                        : std::nearbyint(x);
  const double least = static_cast<double>(std::numeric_limits<D>::min());
  if (x <= least) return static_cast<uint64_t>(std::numeric_limits<D>::min());
  if (x >= std::ldexp(1.0, std::numeric_limits<D>::digits))
    return static_cast<uint64_t>(std::numeric_limits<D>::max());
  return static_cast<uint64_t>(static_cast<D>(x));
}

// i.number: how it rounds to an integer; i.width, i.to: bytes of the registers
template <class D, class S, bool kFlush>
void convert(Warp& w, const Instruction& i) {
  for (unsigned l = 0; l < kLanes; ++l) {
    if (!(w.on >> l & 1)) continue;
    const uint64_t bits = w.get(i.o[1], i.width, l);
    uint64_t made = 0;
    if constexpr (kIsInteger<S> && kIsInteger<D>)
      made = static_cast<uint64_t>(static_cast<D>(static_cast<S>(bits)));
    else if constexpr (kIsInteger<S>)
      made = float_bits<D>(static_cast<float>(static_cast<S>(bits)));
    else if constexpr (kIsInteger<D>)
      made = integer_bits<D>(wide_value<S>(bits), static_cast<char>(i.number));
    else if constexpr (kFlush)
      made = float_bits<D>(flushed(static_cast<float>(wide_value<S>(bits))));
    else
      made = float_bits<D>(wide_value<S>(bits));
    w.put(i.o[0], i.to, l, made);
  }
}

struct Saturated {  // to [0, 1]; NaN is 0
  static float of(float a) { return a > 0 ? std::min(a, 1.0f) : 0.0f; }
};

template <uint16_t (*kNarrow)(float)>
void convert_pair(Warp& w, const Instruction& i) {  // the first operand is the upper half
  uint32_t* d = w.lane_values<uint32_t>(i.o[0]);
  const float *a = w.lane_values<float>(i.o[1]), *b = w.lane_values<float>(i.o[2]);
  w.each([=](unsigned l) { d[l] = uint32_t{kNarrow(a[l])} << 16 | kNarrow(b[l]); });
}

template <class F>
Run of_any(const std::string& type, F f) {
  if (type == "u8" || type == "b8") return f.template operator()<uint8_t>();
  if (type == "s8") return f.template operator()<int8_t>();
  if (type == "f16") return f.template operator()<Half>();
  if (type == "bf16") return f.template operator()<Bfloat>();
  if (type == "f32") return f.template operator()<float>();
  if (type == "f64") return f.template operator()<double>();
  return of_integer(type, f);
}

// shfl.sync: lanes read a register of another
template <char kHow>
void shuffle(Warp& w, const Instruction& i) {
  const uint32_t *a = w.lane_values<uint32_t>(i.o[2]), *b = w.lane_values<uint32_t>(i.o[3]);
  const uint32_t* c = w.lane_values<uint32_t>(i.o[4]);
  uint32_t found[kLanes], inside = 0;
  for (unsigned l = 0; l < kLanes; ++l) {
    if (!(w.on >> l & 1)) continue;
    const uint32_t by = b[l] & 31, clamp = c[l] & 31, segment = c[l] >> 8 & 31;
    const uint32_t last = (l & segment) | (clamp & ~segment), first = l & segment;
    uint32_t from = kHow == 'u'   ? l - by
                    : kHow == 'd' ? l + by
                    : kHow == 'b' ? l ^ by
                                  : first | (by & ~segment);
    const bool valid =
        kHow == 'u' ? static_cast<int>(from) >= static_cast<int>(last) : from <= last;
    if (!valid) from = l;
    if (!(w.on >> from & 1)) throw Fault("a lane reads from one that does not take part");
    found[l] = a[from];
    inside |= uint32_t{valid} << l;
  }
  uint32_t* d = w.lane_values<uint32_t>(i.o[0]);
  for (unsigned l = 0; l < kLanes; ++l)
    if (w.on >> l & 1) d[l] = found[l];
  w.set(i.o[1], inside);
}

template <class T, char kHow>
void reduce(Warp& w, const Instruction& i) {
  const T* a = w.lane_values<T>(i.o[1]);
  const auto combine = [](T x, T y) -> T {
    switch (kHow) {
      case '+':
        return static_cast<T>(static_cast<uint32_t>(x) + static_cast<uint32_t>(y));
      case '>':
        return std::max(x, y);
      case '<':
        return std::min(x, y);
      case '&':
        return x & y;
      case '|':
        return x | y;
      default:
        return x ^ y;
    }
  };
  T sum = a[std::countr_zero(w.on)];
  for (unsigned l = static_cast<unsigned>(std::countr_zero(w.on)) + 1; l < kLanes; ++l)
    if (w.on >> l & 1) sum = combine(sum, a[l]);
  T* d = w.lane_values<T>(i.o[0]);
  w.each([=](unsigned l) { d[l] = sum; });
}

void ballot(Warp& w, const Instruction& i) {
  const uint32_t votes = w.predicate(i.o[1]) & w.on;
  uint32_t* d = w.lane_values<uint32_t>(i.o[0]);
  w.each([=](unsigned l) { d[l] = votes; });
}

template <bool kEvery>
void vote(Warp& w, const Instruction& i) {
  const uint32_t votes = w.predicate(i.o[1]) & w.on;
  w.set(i.o[0], kEvery ? (votes == w.on ? kAll : 0) : (votes ? kAll : 0));
}

void meet_lanes(Warp& w, const Instruction&) {
  if (w.on == kAll) w.lanes_meet();
}

// fence.proxy.async: what the warp has stored, and what it comes after, is visible to matrix units.
void fence_for_matrix_units(Warp& w, const Instruction&) {
  Memory& m = *w.memory;
  ++m.fences[w.index];
  m.fenced[w.index] = m.phase;
  if (!m.parted) return;
  for (unsigned v = 0; v < m.warps; ++v) {
    uint32_t& visible = w.clock[2 * m.warps + v];
    visible = std::max(visible, v == w.index ? w.own() : w.clock[v]);
  }
  ++m.phase;
}

// Any of these, of the lanes that its last operand names: all have to be there.
template <Run kWork>
void checked(Warp& w, const Instruction& i) {
  const uint32_t named =
      w.lane_values<uint32_t>(static_cast<uint32_t>(i.number))[std::countr_zero(w.on)];
  if (named != w.on) throw Fault("lanes that an instruction of the warp names are elsewhere");
  kWork(w, i);
}

void nothing(Warp&, const Instruction&) {}

template <class T>
Run reduction(const std::string& how) {
  if (how == "add") return checked<reduce<T, '+'>>;
  if (how == "max") return checked<reduce<T, '>'>>;
  if (how == "min") return checked<reduce<T, '<'>>;
  if (how == "and") return checked<reduce<T, '&'>>;
  if (how == "or") return checked<reduce<T, '|'>>;
  return how == "xor" ? checked<reduce<T, '^'>> : nullptr;
}

}  // namespace

bool decode_conversion(const Statement& from, Names& names, Instruction& made) {
  if (from.parts[0] != "cvt") return false;
  const std::string &source = from.parts.back(), &target = from.parts.at(from.parts.size() - 2);
  if (from.opcode == "cvt.sat.f32.f32") {
    take(from, names, made, 4);
    made.run = unary<float, float, Saturated>;
    return true;
  }
  if (from.has("sat") || from.has("relu") || target == "tf32") return false;
  if (target == "bf16x2" || target == "f16x2") {
    if (!from.has("rn")) return false;
    for (size_t n = 0; n < 3; ++n) made.o[n] = names.place(from.operands.at(n), 4);
    made.run = target == "f16x2" ? convert_pair<float_to_half> : convert_pair<float_to_bfloat>;
    return true;
  }
  const auto width = [&](const std::string& operand, const std::string& type) {
    return static_cast<uint8_t>(names.is_register(operand) ? names.reg(operand).width
                                                           : std::max(width_of(type), 2u));
  };
  made.to = width(from.operands.at(0), target);
  made.width = width(from.operands.at(1), source);
  made.o[0] = names.place(from.operands[0], made.to);
  made.o[1] = names.place(from.operands[1], made.width);
  const std::string& rounding = from.parts.at(1);
  made.number = rounding == "rzi" ? 'z' : rounding == "rmi" ? 'm' : rounding == "rpi" ? 'p' : 'n';
  if (rounding == "rz" || rounding == "rm" || rounding == "rp" || rounding == "rna") return false;
  const bool flush = from.has("ftz");
  made.run = of_any(target, [&]<class D>() -> Run {
    return of_any(source, [&]<class S>() -> Run {
      return flush ? convert<D, S, true> : convert<D, S, false>;
    });
  });
  return made.run != nullptr;
}

bool decode_exchange(const Statement& from, Names& names, Instruction& made) {
  const std::string &name = from.parts[0], &type = from.parts.back();
  if (from.opcode == "bar.warp.sync") {
    made.number = names.place(from.operands.at(0), 4);
    made.run = checked<meet_lanes>;
    return true;
  }
  if (name == "fence" || name == "membar") {
    if (from.opcode == "fence.proxy.async.shared::cta" || from.opcode == "fence.proxy.async")
      made.run = fence_for_matrix_units;
    else if (from.opcode == "membar.gl" || from.opcode == "fence.acq_rel.gpu")
      made.run = [](Warp& w, const Instruction&) { w.fence(); };
    else
      made.run = nothing;
    return true;
  }
  if (name != "shfl" && name != "redux" && name != "vote") return false;
  made.number = names.place(from.operands.back(), 4);
  if (name == "shfl") {
    const std::string& d = from.operands.at(0);
    const size_t bar = d.find('|');
    made.o[0] = names.place(d.substr(0, bar), 4);
    if (bar != std::string::npos) made.o[1] = names.predicate(d.substr(bar + 1));
    for (unsigned n = 1; n < 4; ++n) made.o[n + 1] = names.place(from.operands.at(n), 4);
    if (from.has("bfly")) made.run = checked<shuffle<'b'>>;
    if (from.has("idx")) made.run = checked<shuffle<'i'>>;
    if (from.has("up")) made.run = checked<shuffle<'u'>>;
    if (from.has("down")) made.run = checked<shuffle<'d'>>;
  } else if (name == "redux") {
    made.o[0] = names.place(from.operands.at(0), 4);
    made.o[1] = names.place(from.operands.at(1), 4);
    made.run = type == "s32" ? reduction<int32_t>(from.parts.at(2))
                             : reduction<uint32_t>(from.parts.at(2));
  } else if (from.has("ballot")) {
    made.o[0] = names.place(from.operands.at(0), 4);
    made.o[1] = names.predicate(from.operands.at(1));
    made.run = checked<ballot>;
  } else {
    made.o[0] = names.predicate(from.operands.at(0));
    made.o[1] = names.predicate(from.operands.at(1));
    made.run = from.has("all")   ? checked<vote<true>>
               : from.has("any") ? checked<vote<false>>
                                 : nullptr;
  }
  return made.run != nullptr;
}

}  // namespace ptx
