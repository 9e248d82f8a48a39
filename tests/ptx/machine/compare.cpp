// setp: comparisons of lanes, whose answers are predicates.
#include "types.h"

namespace ptx {
namespace {

// One that ends in u is true where an operand is NaN.
enum class Test { eq, ne, lt, le, gt, ge, num, nan };

struct Comparison {
  Test test;
  bool unordered;
};

Comparison comparison(const std::string& word) {
  static const std::map<std::string, Comparison> known = {
      {"eq", {Test::eq, false}}, {"ne", {Test::ne, false}},   {"lt", {Test::lt, false}},
      {"le", {Test::le, false}}, {"gt", {Test::gt, false}},   {"ge", {Test::ge, false}},
      {"lo", {Test::lt, false}}, {"ls", {Test::le, false}},   {"hi", {Test::gt, false}},
      {"hs", {Test::ge, false}}, {"equ", {Test::eq, true}},   {"neu", {Test::ne, true}},
      {"ltu", {Test::lt, true}}, {"leu", {Test::le, true}},   {"gtu", {Test::gt, true}},
      {"geu", {Test::ge, true}}, {"num", {Test::num, false}}, {"nan", {Test::nan, true}},
  };
  const auto found = known.find(word);
  if (found == known.end()) throw Fault("no comparison: " + word);
  return found->second;
}

template <class T>
bool holds(Test test, T a, T b) {
  switch (test) {
    case Test::eq:
      return a == b;
    case Test::ne:
      return a != b;
    case Test::lt:
      return a < b;
    case Test::le:
      return a <= b;
    case Test::gt:
      return a > b;
    case Test::ge:
      return a >= b;
    case Test::num:
      return true;
    default:
      return false;
  }
}

template <class T, class F>
uint32_t compare_lanes(Warp& w, const Instruction& i, F value) {
  const T *a = w.lane_values<T>(i.o[2]), *b = w.lane_values<T>(i.o[3]);
  const Test test = static_cast<Test>(i.width);
  uint32_t bits = 0;
  for (unsigned l = 0; l < kLanes; ++l) {
    const auto x = value(a[l]), y = value(b[l]);
    const bool answer = x != x || y != y ? i.sign : holds(test, x, y);
    bits |= uint32_t{answer} << l;
  }
  return bits;
}

// and, or, xor with a further predicate
uint32_t joined(Warp& w, const Instruction& i, uint32_t bits) {
  if (i.o[4] == kNowhere) return bits;
  const uint32_t other = w.predicate(i.o[4]);
  return i.number == 'a' ? bits & other : i.number == 'o' ? bits | other : bits ^ other;
}

template <class T>
void compare(Warp& w, const Instruction& i) {
  const uint32_t bits = compare_lanes<T>(w, i, [](T x) { return x; });
  w.set(i.o[0], joined(w, i, bits));
  if (i.o[1] != kNowhere) w.set(i.o[1], joined(w, i, ~bits));
}

template <float (*kWiden)(uint16_t)>
void compare_16(Warp& w, const Instruction& i) {
  w.set(i.o[0], joined(w, i, compare_lanes<uint16_t>(w, i, kWiden)));
}

template <float (*kWiden)(uint16_t)>
void compare_pairs(Warp& w, const Instruction& i) {
  w.set(i.o[0],
        compare_lanes<uint32_t>(w, i, [](uint32_t x) { return kWiden(static_cast<uint16_t>(x)); }));
  w.set(i.o[1], compare_lanes<uint32_t>(
                    w, i, [](uint32_t x) { return kWiden(static_cast<uint16_t>(x >> 16)); }));
}

}  // namespace

bool decode_comparison(const Statement& from, Names& names, Instruction& made) {
  if (from.parts[0] != "setp") return false;
  const std::string& type = from.parts.back();
  const Comparison what = comparison(from.parts.at(1));
  made.width = static_cast<uint8_t>(what.test);
  made.sign = what.unordered;
  const std::string& d = from.operands.at(0);
  const size_t bar = d.find('|');
  made.o[0] = names.predicate(d.substr(0, bar));
  if (bar != std::string::npos) made.o[1] = names.predicate(d.substr(bar + 1));
  made.o[2] = names.place(from.operands.at(1), width_of(type));
  made.o[3] = names.place(from.operands.at(2), width_of(type));
  if (from.operands.size() > 3) {
    made.o[4] = names.predicate(from.operands[3]);
    made.number = from.parts.at(2)[0];
  }
  if (type == "f32") made.run = compare<float>;
  if (type == "f64") made.run = compare<double>;
  if (type == "bf16") made.run = compare_16<bfloat_to_float>;
  if (type == "f16") made.run = compare_16<half_to_float>;
  if (type == "bf16x2") made.run = compare_pairs<bfloat_to_float>;
  if (type == "f16x2") made.run = compare_pairs<half_to_float>;
  if (made.run == nullptr) made.run = of_integer(type, []<class T>() -> Run { return compare<T>; });
  return made.run != nullptr;
}

}  // namespace ptx
