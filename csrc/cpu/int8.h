// How a processor multiplies 8-bit integers, and how rows of them lie.
//
// A sum takes a group of neighbours at a time: four bytes where the processor has AMX or VNNI, of
// which the latter multiplies unsigned by signed ones, so that rows are kept 128 too large; else
// two 16-bit integers. Rows lie in panels of kPanelRows, group after group: element (row, k) at
// [(k / group * kPanelRows + row) * group + k % group]. Up to kDotRows of them lie as they are.
#pragma once
#include <algorithm>
#include <array>
#include <bit>
#include <cstring>

#include "vec.h"

namespace tfm_kernels {

constexpr int64_t kPanelRows = 32;
constexpr int64_t kIntegers = 64;  // rows and weights are filled up to a multiple of so many, by 0

// What multiplies: vectors of pairs of 16-bit integers, which every processor has; of groups of
// four bytes (AVX512_VNNI); the matrix library's tiles of such groups (AMX).
enum class IntegerUnit { pairs, groups, tiles };

// Bytes that an integer of a row takes.
inline int64_t integer_bytes(IntegerUnit unit) { return unit == IntegerUnit::pairs ? 2 : 1; }

inline namespace CPU_CAPABILITY {
namespace {

// How groups of integers are multiplied and added to vectors of sums. E: an integer of a row, W:
// one of the weights as they are read. (`asm`, because this file is also compiled for processors
// that do not have the instruction.)
template <IntegerUnit unit>
struct Integers;

#if defined(CPU_CAPABILITY_AVX512)
struct Sums512 {
  static constexpr bool kTiles = false;
  using Sum = __m512i;
  static constexpr int64_t kLanes = 16;
  static Sum repeat(int32_t x) { return _mm512_set1_epi32(x); }
  static Sum loaded(const int32_t* p) { return _mm512_loadu_si512(p); }
  static void store(int32_t* p, Sum s) { _mm512_storeu_si512(p, s); }
  static Sum plus(Sum a, Sum b) { return _mm512_add_epi32(a, b); }
  static int32_t total(Sum s) { return _mm512_reduce_add_epi32(s); }
};

template <>
struct Integers<IntegerUnit::groups> : Sums512 {
  using E = uint8_t;
  using W = int8_t;
  static constexpr int64_t kGroup = 4, kOffset = 128;
  static Sum load(const E* p) { return _mm512_loadu_si512(p); }
  static Sum weights(const int8_t* p) { return _mm512_loadu_si512(p); }
  static Sum add(Sum row, Sum weight, Sum sum) {
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(row), "v"(weight));
    return sum;
  }
  static Sum ones() { return _mm512_set1_epi8(1); }
};

// Whose products gemm_tile() forms.
template <>
struct Integers<IntegerUnit::tiles> {
  using E = int8_t;
  static constexpr int64_t kGroup = 4, kOffset = 0;
  static constexpr bool kTiles = true;
};

template <>
struct Integers<IntegerUnit::pairs> : Sums512 {
  using E = int16_t;
  using W = int16_t;
  static constexpr int64_t kGroup = 2, kOffset = 0;
  static Sum load(const E* p) { return _mm512_loadu_si512(p); }
  static Sum weights(const int8_t* p) {
    return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static Sum add(Sum row, Sum weight, Sum sum) {
    return _mm512_add_epi32(sum, _mm512_madd_epi16(row, weight));
  }
  static Sum ones() { return _mm512_set1_epi16(1); }
};
#elif defined(CPU_CAPABILITY_AVX2)
template <>
struct Integers<IntegerUnit::pairs> {
  static constexpr bool kTiles = false;
  using E = int16_t;
  using W = int16_t;
  using Sum = __m256i;
  static constexpr int64_t kLanes = 8, kGroup = 2, kOffset = 0;
  static Sum repeat(int32_t x) { return _mm256_set1_epi32(x); }
  static Sum loaded(const int32_t* p) {
    return _mm256_loadu_si256(reinterpret_cast<const Sum*>(p));
  }
  static void store(int32_t* p, Sum s) { _mm256_storeu_si256(reinterpret_cast<Sum*>(p), s); }
  static Sum plus(Sum a, Sum b) { return _mm256_add_epi32(a, b); }
  static int32_t total(Sum s) {
    alignas(32) int32_t lanes[kLanes];
    store(lanes, s);
    int32_t sum = 0;
    for (int32_t lane : lanes) sum += lane;
    return sum;
  }
  static Sum load(const E* p) { return _mm256_loadu_si256(reinterpret_cast<const Sum*>(p)); }
  static Sum weights(const int8_t* p) {
    return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static Sum add(Sum row, Sum weight, Sum sum) {
    return _mm256_add_epi32(sum, _mm256_madd_epi16(row, weight));
  }
  static Sum ones() { return _mm256_set1_epi16(1); }
};
#else
template <>
struct Integers<IntegerUnit::pairs> {
  static constexpr bool kTiles = false;
  using E = int16_t;
  using W = int16_t;
  static constexpr int64_t kLanes = 8, kGroup = 2, kOffset = 0;
  using Sum = std::array<int32_t, kLanes>;
  static Sum repeat(int32_t x) {
    Sum s;
    s.fill(x);
    return s;
  }
  static Sum loaded(const int32_t* p) {
    return std::bit_cast<Sum>(*reinterpret_cast<const Sum*>(p));
  }
  static void store(int32_t* p, const Sum& s) { std::copy_n(s.data(), kLanes, p); }
  static Sum plus(Sum a, const Sum& b) {
    for (int64_t l = 0; l < kLanes; ++l) a[l] += b[l];
    return a;
  }
  static int32_t total(const Sum& s) {
    int32_t sum = 0;
    for (int32_t lane : s) sum += lane;
    return sum;
  }
  static Sum load(const E* p) {
    Sum s;
    std::memcpy(&s, p, sizeof s);
    return s;
  }
  static Sum weights(const int8_t* p) {
    E wide[2 * kLanes];
    std::copy_n(p, 2 * kLanes, wide);
    return load(wide);
  }
  static Sum add(const Sum& row, const Sum& weight, Sum sum) {
    E a[2 * kLanes], b[2 * kLanes];
    std::memcpy(a, &row, sizeof a);
    std::memcpy(b, &weight, sizeof b);
    for (int64_t l = 0; l < kLanes; ++l)
      sum[l] += a[2 * l] * b[2 * l] + a[2 * l + 1] * b[2 * l + 1];
    return sum;
  }
  static Sum ones() { return repeat(0x10001); }
};
#endif

// Calls body(Integers) for a unit.
template <typename Body>
void for_integers([[maybe_unused]] IntegerUnit unit, Body body) {
#if defined(CPU_CAPABILITY_AVX512)
  if (unit == IntegerUnit::tiles) return body(Integers<IntegerUnit::tiles>{});
  if (unit == IntegerUnit::groups) return body(Integers<IntegerUnit::groups>{});
#endif
  body(Integers<IntegerUnit::pairs>{});
}

}  // namespace
}  // namespace CPU_CAPABILITY
}  // namespace tfm_kernels
