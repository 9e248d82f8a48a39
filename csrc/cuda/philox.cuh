// Philox4x32-10 (Salmon, Moraes, Dror, Shaw 2011), the random rule of tfm_kernels/dropout.py.
//
// Key = low and high half of the seed; counter = (column / 4, low and high half of the row number,
// 0); lane = column % 4. An element is kept where its draw is above Dropout::last_dropped.
#pragma once
#include "pack.cuh"

namespace tfm_kernels {

// The draws of columns 4 * block + 0..3 of one row.
__device__ inline uint4 philox(uint64_t seed, uint64_t row, uint32_t block) {
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  uint32_t c0 = block, c1 = static_cast<uint32_t>(row), c2 = static_cast<uint32_t>(row >> 32);
  uint32_t c3 = 0;
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t{0xD2511F53u} * c0, p1 = uint64_t{0xCD9E8D57u} * c2;
    c0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0;
    c2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c1 = static_cast<uint32_t>(p1);
    c3 = static_cast<uint32_t>(p0);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {c0, c1, c2, c3};
}

// Dropout of the thread's columns of row m: what is dropped becomes 0, the rest is scaled.
template <int packs, int lanes>
__device__ inline void drop(const Dropout& dropout, int64_t m, const Place& place,
                            float (&values)[packs][lanes]) {
  const uint64_t seed = static_cast<uint64_t>(*dropout.seed);
  const uint64_t row = static_cast<uint64_t>(dropout.rows ? dropout.rows[m] : m);
#pragma unroll
  for (int k = 0; k < packs; ++k) {
    const int column = place.first + k * place.distance;
    if (column >= place.n) continue;
#pragma unroll
    for (int i = 0; i < lanes; i += 4) {
      const uint4 draws = philox(seed, row, static_cast<uint32_t>(column + i) / 4);
      const uint32_t each[4] = {draws.x, draws.y, draws.z, draws.w};
#pragma unroll
      for (int j = 0; j < 4; ++j)
        values[k][i + j] = each[j] > dropout.last_dropped ? values[k][i + j] * dropout.scale : 0.0f;
    }
  }
}

}  // namespace tfm_kernels
