// Philox4x32-10 (Salmon, Moraes, Dror, Shaw 2011), the rule of tfm_kernels/dropout.py, for one row
// of draws.
//
// Key = low and high half of the seed; counter = (column / 4, low and high half of row, 0); lane =
// column % 4. Written as loops over 16 counters at once, which every compiler turns into vector
// code.
#pragma once
#include <cstdint>

namespace tfm_kernels {
inline namespace CPU_CAPABILITY {
namespace {

constexpr int kPhiloxLanes = 64;  // columns per block of 16 counters

constexpr int kPhiloxCounters = kPhiloxLanes / 4;

// Ten rounds on 16 counters at once; the four words of output take the counters' place.
inline void philox_rounds(uint64_t seed, uint32_t* c0, uint32_t* c1, uint32_t* c2, uint32_t* c3) {
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
#pragma omp simd
    for (int i = 0; i < kPhiloxCounters; ++i) {
      const uint64_t p0 = uint64_t{0xD2511F53u} * c0[i], p1 = uint64_t{0xCD9E8D57u} * c2[i];
      const uint32_t n0 = static_cast<uint32_t>(p1 >> 32) ^ c1[i] ^ k0;
      const uint32_t n2 = static_cast<uint32_t>(p0 >> 32) ^ c3[i] ^ k1;
      c1[i] = static_cast<uint32_t>(p1);
      c3[i] = static_cast<uint32_t>(p0);
      c0[i] = n0;
      c2[i] = n2;
    }
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
}

// draws[c] for columns first + 0..63 of one row; first must be a multiple of 4.
inline void philox_block(uint64_t seed, uint64_t row, uint64_t first, uint32_t* draws) {
  uint32_t c0[kPhiloxCounters], c1[kPhiloxCounters], c2[kPhiloxCounters], c3[kPhiloxCounters];
  const uint32_t base = static_cast<uint32_t>(first / 4);
  for (int i = 0; i < kPhiloxCounters; ++i) {
    c0[i] = base + static_cast<uint32_t>(i);
    c1[i] = static_cast<uint32_t>(row);
    c2[i] = static_cast<uint32_t>(row >> 32);
    c3[i] = 0;
  }
  philox_rounds(seed, c0, c1, c2, c3);
  for (int i = 0; i < kPhiloxCounters; ++i) {
    draws[4 * i] = c0[i];
    draws[4 * i + 1] = c1[i];
    draws[4 * i + 2] = c2[i];
    draws[4 * i + 3] = c3[i];
  }
}

// draws[c][i] for columns first + 0..3 of 16 rows; first must be a multiple of 4.
inline void philox_columns(uint64_t seed, const int64_t* rows, uint64_t first,
                           uint32_t (*draws)[kPhiloxCounters]) {
  for (int i = 0; i < kPhiloxCounters; ++i) {
    draws[0][i] = static_cast<uint32_t>(first / 4);
    draws[1][i] = static_cast<uint32_t>(rows[i]);
    draws[2][i] = static_cast<uint32_t>(static_cast<uint64_t>(rows[i]) >> 32);
    draws[3][i] = 0;
  }
  philox_rounds(seed, draws[0], draws[1], draws[2], draws[3]);
}

// factors[j] = scale where column first + j is kept, else 0, for j < n. Any first, any n >= 0.
// `bound` is ceil(p * 2^32) and may be 2^32: then nothing is kept.
template <typename F>
void dropout_factors(uint64_t seed, uint64_t row, int64_t first, int64_t n, uint64_t bound, F scale,
                     F* factors) {
  alignas(64) uint32_t draws[kPhiloxLanes];
  int64_t j = 0;
  while (j < n) {
    const int64_t column = first + j, skip = column % 4;
    philox_block(seed, row, static_cast<uint64_t>(column - skip), draws);
    const int64_t count = n - j < kPhiloxLanes - skip ? n - j : kPhiloxLanes - skip;
    for (int64_t i = 0; i < count; ++i) factors[j + i] = draws[skip + i] >= bound ? scale : F(0);
    j += count;
  }
}

}  // namespace
}  // namespace CPU_CAPABILITY

// ceil(p * 2^32) and 1 / (1 - p), computed once on the host.
struct Dropout {
  uint64_t seed = 0, bound = 0;
  double scale = 1.0;
  bool active() const { return bound != 0; }
};

}  // namespace tfm_kernels
