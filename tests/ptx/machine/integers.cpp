// Integers, bits, predicates, moves.
#include <type_traits>

#include "types.h"

namespace ptx {
namespace {

template <class T>
using Bits = std::make_unsigned_t<T>;

template <class T>
using Wide = std::conditional_t<
    sizeof(T) == 2, std::conditional_t<std::is_signed_v<T>, int32_t, uint32_t>,
    std::conditional_t<sizeof(T) == 4, std::conditional_t<std::is_signed_v<T>, int64_t, uint64_t>,
                       std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>>>;

template <class T>
struct Add {
  static T of(T a, T b) {
    return static_cast<T>(static_cast<Bits<T>>(a) + static_cast<Bits<T>>(b));
  }
};
template <class T>
struct Sub {
  static T of(T a, T b) {
    return static_cast<T>(static_cast<Bits<T>>(a) - static_cast<Bits<T>>(b));
  }
};
template <class T>
struct MulLow {
  static T of(T a, T b) {
    return static_cast<T>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b));
  }
};
template <class T>
struct MulHigh {
  static T of(T a, T b) {
    return static_cast<T>(static_cast<Wide<T>>(a) * static_cast<Wide<T>>(b) >> 8 * sizeof(T));
  }
};
template <class T>
struct MulWide {
  static Wide<T> of(T a, T b) { return static_cast<Wide<T>>(a) * static_cast<Wide<T>>(b); }
};
template <class T>
struct Divide {  // by 0: a GPU gives all ones
  static T of(T a, T b) {
    if (b == 0) return static_cast<T>(~T{0});
    if constexpr (std::is_signed_v<T>)
      if (b == -1) return Sub<T>::of(0, a);
    return static_cast<T>(a / b);
  }
};
template <class T>
struct Remain {
  static T of(T a, T b) {
    return b == 0 ? a : Sub<T>::of(a, MulLow<T>::of(Divide<T>::of(a, b), b));
  }
};
template <class T>
struct Least {
  static T of(T a, T b) { return a < b ? a : b; }
};
template <class T>
struct Most {
  static T of(T a, T b) { return a > b ? a : b; }
};
template <class T>
struct LeastNotNegative {
  static T of(T a, T b) { return std::max<T>(std::min(a, b), 0); }
};
template <class T>
struct MostNotNegative {
  static T of(T a, T b) { return std::max<T>(std::max(a, b), 0); }
};
template <class T>
struct And {
  static T of(T a, T b) { return a & b; }
};
template <class T>
struct Or {
  static T of(T a, T b) { return a | b; }
};
template <class T>
struct Xor {
  static T of(T a, T b) { return a ^ b; }
};
template <class T>
struct Not {
  static T of(T a) { return static_cast<T>(~a); }
};
template <class T>
struct Negate {
  static T of(T a) { return Sub<T>::of(0, a); }
};
template <class T>
struct Absolute {
  static T of(T a) { return a < 0 ? Sub<T>::of(0, a) : a; }
};
template <class T>
struct CountOnes {
  static uint32_t of(T a) { return static_cast<uint32_t>(std::popcount(static_cast<Bits<T>>(a))); }
};
template <class T>
struct LeadingZeros {
  static uint32_t of(T a) {
    return static_cast<uint32_t>(std::countl_zero(static_cast<Bits<T>>(a)));
  }
};

template <class F, class T>
struct TwoShorts {  // in a register of 32 bits
  static uint32_t of(uint32_t a, uint32_t b) {
    const auto upper =
        static_cast<uint16_t>(F::of(static_cast<T>(a >> 16), static_cast<T>(b >> 16)));
    return uint32_t{upper} << 16 |
           static_cast<uint16_t>(F::of(static_cast<T>(a), static_cast<T>(b)));
  }
};

template <class T>
Run of_two_shorts(const std::string& name) {
  if (name == "add") return binary<uint32_t, uint32_t, TwoShorts<Add<T>, T>>;
  if (name == "min") return binary<uint32_t, uint32_t, TwoShorts<Least<T>, T>>;
  return name == "max" ? binary<uint32_t, uint32_t, TwoShorts<Most<T>, T>> : nullptr;
}

template <class T, bool kLeft>
void shift(Warp& w, const Instruction& i) {
  T* d = w.lane_values<T>(i.o[0]);
  const T* a = w.lane_values<T>(i.o[1]);
  const uint32_t* b = w.lane_values<uint32_t>(i.o[2]);
  constexpr uint32_t kBits = 8 * sizeof(T);
  w.each([=](unsigned l) {
    if (b[l] < kBits)
      d[l] = static_cast<T>(kLeft ? static_cast<Bits<T>>(a[l]) << b[l] : a[l] >> b[l]);
    else
      d[l] = kLeft || a[l] >= 0 ? T{0} : static_cast<T>(-1);
  });
}

template <class T>
void multiply_add_wide(Warp& w, const Instruction& i) {
  using W = Wide<T>;
  W* d = w.lane_values<W>(i.o[0]);
  const T *a = w.lane_values<T>(i.o[1]), *b = w.lane_values<T>(i.o[2]);
  const W* c = w.lane_values<W>(i.o[3]);
  w.each([=](unsigned l) { d[l] = Add<W>::of(MulWide<T>::of(a[l], b[l]), c[l]); });
}

template <class T>
struct MultiplyAdd {
  static T of(T a, T b, T c) { return Add<T>::of(MulLow<T>::of(a, b), c); }
};

template <class T>
void extract_bits(Warp& w, const Instruction& i) {
  T* d = w.lane_values<T>(i.o[0]);
  const T* a = w.lane_values<T>(i.o[1]);
  const uint32_t *from = w.lane_values<uint32_t>(i.o[2]), *count = w.lane_values<uint32_t>(i.o[3]);
  constexpr uint32_t kBits = 8 * sizeof(T);
  w.each([=](unsigned l) {
    const uint32_t first = from[l] & 0xff, n = std::min(count[l] & 0xff, kBits);
    Bits<T> value = first < kBits ? static_cast<Bits<T>>(a[l]) >> first : 0;
    const uint32_t top = std::min(first + n, kBits) - 1;  // the bit that signs are taken from
    const bool negative = std::is_signed_v<T> && n && static_cast<Bits<T>>(a[l]) >> top & 1;
    if (n < kBits) {
      const Bits<T> mask = static_cast<Bits<T>>((uint64_t{1} << n) - 1);
      value = negative ? static_cast<Bits<T>>(value | ~mask) : static_cast<Bits<T>>(value & mask);
    }
    d[l] = static_cast<T>(value);
  });
}

// bfi: the first operand's lowest bits into the second
template <class T>
void insert_bits(Warp& w, const Instruction& i) {
  T* d = w.lane_values<T>(i.o[0]);
  const T *a = w.lane_values<T>(i.o[1]), *b = w.lane_values<T>(i.o[2]);
  const uint32_t *from = w.lane_values<uint32_t>(i.o[3]), *count = w.lane_values<uint32_t>(i.o[4]);
  constexpr uint32_t kBits = 8 * sizeof(T);
  w.each([=](unsigned l) {
    const uint32_t first = from[l] & 0xff, n = count[l] & 0xff;
    const T ones = n < kBits ? (T{1} << n) - 1 : ~T{0};
    const T mask = first < kBits ? ones << first : 0;
    d[l] = first < kBits ? (b[l] & ~mask) | (a[l] << first & mask) : b[l];
  });
}

template <class T>
void select(Warp& w, const Instruction& i) {
  T* d = w.lane_values<T>(i.o[0]);
  const T *a = w.lane_values<T>(i.o[1]), *b = w.lane_values<T>(i.o[2]);
  const uint32_t p = w.predicate(i.o[3]);
  w.each([=](unsigned l) { d[l] = p >> l & 1 ? a[l] : b[l]; });
}

template <class T>
void move(Warp& w, const Instruction& i) {
  T* d = w.lane_values<T>(i.o[0]);
  const T* a = w.lane_values<T>(i.o[1]);
  w.each([=](unsigned l) { d[l] = a[l]; });
}

void permute_bytes(Warp& w, const Instruction& i) {
  uint32_t* d = w.lane_values<uint32_t>(i.o[0]);
  const uint32_t *a = w.lane_values<uint32_t>(i.o[1]), *b = w.lane_values<uint32_t>(i.o[2]);
  const uint32_t* c = w.lane_values<uint32_t>(i.o[3]);
  w.each([=](unsigned l) {
    const uint64_t bytes = uint64_t{b[l]} << 32 | a[l];
    uint32_t value = 0;
    for (unsigned n = 0; n < 4; ++n) {
      const uint32_t pick = c[l] >> 4 * n & 0xf;
      uint32_t byte = static_cast<uint32_t>(bytes >> 8 * (pick & 7)) & 0xff;
      if (pick & 8) byte = byte & 0x80 ? 0xff : 0;
      value |= byte << 8 * n;
    }
    d[l] = value;
  });
}

void any_of_three(Warp& w, const Instruction& i) {  // lop3
  uint32_t* d = w.lane_values<uint32_t>(i.o[0]);
  const uint32_t *a = w.lane_values<uint32_t>(i.o[1]), *b = w.lane_values<uint32_t>(i.o[2]);
  const uint32_t* c = w.lane_values<uint32_t>(i.o[3]);
  const uint32_t table = w.lane_values<uint32_t>(i.o[4])[0];
  w.each([=](unsigned l) {
    uint32_t value = 0;
    for (unsigned n = 0; n < 8; ++n)
      if (table >> n & 1)
        value |= (n & 4 ? a[l] : ~a[l]) & (n & 2 ? b[l] : ~b[l]) & (n & 1 ? c[l] : ~c[l]);
    d[l] = value;
  });
}

template <bool kLeft>
void funnel(Warp& w, const Instruction& i) {  // shf.l.wrap, shf.r.wrap
  uint32_t* d = w.lane_values<uint32_t>(i.o[0]);
  const uint32_t *a = w.lane_values<uint32_t>(i.o[1]), *b = w.lane_values<uint32_t>(i.o[2]);
  const uint32_t* c = w.lane_values<uint32_t>(i.o[3]);
  w.each([=](unsigned l) {
    const uint64_t both = uint64_t{b[l]} << 32 | a[l];
    const uint32_t n = c[l] & 31;
    d[l] = static_cast<uint32_t>(kLeft ? both << n >> 32 : both >> n);
  });
}

template <class F>
void predicates(Warp& w, const Instruction& i) {
  w.set(i.o[0], F::of(w.predicate(i.o[1]), w.predicate(i.o[2])));
}

void not_predicate(Warp& w, const Instruction& i) { w.set(i.o[0], ~w.predicate(i.o[1])); }
void move_predicate(Warp& w, const Instruction& i) { w.set(i.o[0], w.predicate(i.o[1])); }

// mov with { } on one side: pieces of a wider register
void gather(Warp& w, const Instruction& i) {
  for (unsigned l = 0; l < kLanes; ++l) {
    if (!(w.on >> l & 1)) continue;
    uint64_t value = 0;
    for (size_t n = 0; n < i.list.size(); ++n)
      value |= w.get(i.list[n], i.width, l) << 8 * i.width * n;
    w.put(i.o[0], i.to, l, value);
  }
}

void scatter(Warp& w, const Instruction& i) {
  for (unsigned l = 0; l < kLanes; ++l) {
    if (!(w.on >> l & 1)) continue;
    const uint64_t value = w.get(i.o[0], i.to, l);
    for (size_t n = 0; n < i.list.size(); ++n)
      if (i.list[n] != kNowhere) w.put(i.list[n], i.width, l, value >> 8 * i.width * n);
  }
}

bool decode_move(const Statement& from, Names& names, Instruction& made) {
  const std::string &type = from.parts.back(), &d = from.operands.at(0), &a = from.operands.at(1);
  if (type == "pred") {
    made.run = move_predicate;
    made.o[0] = names.predicate(d);
    made.o[1] = names.predicate(a);
    return true;
  }
  const unsigned width = width_of(type);
  if (d[0] != '{' && a[0] != '{') {
    take(from, names, made, width);
    made.run = of_width(width, []<class T>() -> Run { return move<T>; });
    return true;
  }
  const bool gathers = a[0] == '{';
  const std::vector<std::string> pieces = names.vector(gathers ? a : d);
  made.to = static_cast<uint8_t>(width);
  made.width = static_cast<uint8_t>(width / pieces.size());
  made.o[0] = names.place(gathers ? d : a, width);
  for (const std::string& piece : pieces) made.list.push_back(names.place(piece, made.width));
  made.run = gathers ? gather : scatter;
  return true;
}

bool decode_predicates(const Statement& from, Names& names, Instruction& made) {
  const std::string& name = from.parts[0];
  if (name == "and") made.run = predicates<And<uint32_t>>;
  if (name == "or") made.run = predicates<Or<uint32_t>>;
  if (name == "xor") made.run = predicates<Xor<uint32_t>>;
  if (name == "not") made.run = not_predicate;
  for (size_t n = 0; made.run && n < from.operands.size(); ++n)
    made.o[n] = names.predicate(from.operands[n]);
  return made.run != nullptr;
}

}  // namespace

bool decode_integers(const Statement& from, Names& names, Instruction& made) {
  const std::string &name = from.parts[0], &type = from.parts.back();
  if (name == "mov") return decode_move(from, names, made);
  if (type == "pred") return decode_predicates(from, names, made);
  const unsigned width = width_of(type);
  if (name == "selp") {
    for (size_t n = 0; n < 3; ++n) made.o[n] = names.place(from.operands.at(n), width);
    made.o[3] = names.predicate(from.operands.at(3));
    made.run = of_width(width, []<class T>() -> Run { return select<T>; });
    return true;
  }
  if (name == "cvta" && from.has("to") && from.has("global")) {  // the same address
    take(from, names, made, 8);
    made.run = move<uint64_t>;
    return true;
  }
  if (name == "bfi") {
    for (size_t n = 0; n < 5; ++n) made.o[n] = names.place(from.operands.at(n), n < 3 ? width : 4);
    made.run = type == "b32" ? insert_bits<uint32_t> : insert_bits<uint64_t>;
    return true;
  }
  if (name == "prmt" && type == "b32") made.run = permute_bytes;
  if (name == "lop3" && type == "b32") made.run = any_of_three;
  if (name == "shf" && from.has("wrap")) made.run = from.has("l") ? funnel<true> : funnel<false>;
  if (type == "s16x2" && from.parts.size() == 2) made.run = of_two_shorts<int16_t>(name);
  if (type == "u16x2" && from.parts.size() == 2) made.run = of_two_shorts<uint16_t>(name);
  if (made.run != nullptr) {
    take(from, names, made, 4);
    return true;
  }
  const bool wide = from.has("wide");
  made.run = of_integer(type, [&]<class T>() -> Run {
    if (name == "add") return binary<T, T, Add<T>>;
    if (name == "sub") return binary<T, T, Sub<T>>;
    if (name == "mul" && from.has("lo")) return binary<T, T, MulLow<T>>;
    if (name == "mul" && from.has("hi")) return binary<T, T, MulHigh<T>>;
    if constexpr (sizeof(T) < 8) {
      if (name == "mul" && wide) return binary<Wide<T>, T, MulWide<T>>;
      if (name == "mad" && wide) return multiply_add_wide<T>;
    }
    if (name == "mad" && from.has("lo")) return ternary<T, T, MultiplyAdd<T>>;
    if (name == "div") return binary<T, T, Divide<T>>;
    if (name == "rem") return binary<T, T, Remain<T>>;
    if (name == "min" && from.has("relu")) return binary<T, T, LeastNotNegative<T>>;
    if (name == "max" && from.has("relu")) return binary<T, T, MostNotNegative<T>>;
    if (name == "min") return binary<T, T, Least<T>>;
    if (name == "max") return binary<T, T, Most<T>>;
    if (name == "and") return binary<T, T, And<T>>;
    if (name == "or") return binary<T, T, Or<T>>;
    if (name == "xor") return binary<T, T, Xor<T>>;
    if (name == "not") return unary<T, T, Not<T>>;
    if (name == "neg") return unary<T, T, Negate<T>>;
    if (name == "abs") return unary<T, T, Absolute<T>>;
    if (name == "popc") return unary<uint32_t, T, CountOnes<T>>;
    if (name == "clz") return unary<uint32_t, T, LeadingZeros<T>>;
    if (name == "shl") return shift<T, true>;
    if (name == "shr") return shift<T, false>;
    if constexpr (sizeof(T) > 2)
      if (name == "bfe") return extract_bits<T>;
    return nullptr;
  });
  if (made.run == nullptr) return false;
  const bool counts = name == "popc" || name == "clz", shifts = name == "shl" || name == "shr";
  for (size_t n = 0; n < from.operands.size(); ++n) {
    unsigned each = width;
    if ((wide && (n == 0 || n == 3))) each = 2 * width;
    if ((counts && n == 0) || (shifts && n == 2) || (name == "bfe" && n > 1)) each = 4;
    made.o[n] = names.place(from.operands[n], each);
  }
  return true;
}

}  // namespace ptx
