// What csrc/cuda/mma.cuh needs of a GPU: a warp's instructions, lane by lane as PTX says, and
// copies that arrive no earlier than they are waited for.
#pragma once
#include <cstdint>
#include <cstring>

#include "simt.h"

namespace simt {

// 16-bit element i of a lane's registers, widened.
template <typename T>
float element(const uint32_t* words, int i) {
  const auto bits = static_cast<uint16_t>(words[i / 2] >> (i % 2 * 16));
  T value;
  std::memcpy(&value, &bits, sizeof(bits));
  return static_cast<float>(value);
}

struct MmaLane {
  float* c;
  const uint32_t *a, *b;
};

template <typename T>
void mma_of_warp(void* const* lanes) {
  float a[16][16], b[8][16];
  for (int lane = 0; lane < 32; ++lane) {
    const auto& of = *static_cast<const MmaLane*>(lanes[lane]);
    const int g = lane / 4, t = lane % 4;
    for (int i = 0; i < 8; ++i)
      a[g + i / 2 % 2 * 8][2 * t + i % 2 + i / 4 * 8] = element<T>(of.a, i);
    for (int i = 0; i < 4; ++i) b[g][2 * t + i % 2 + i / 2 * 8] = element<T>(of.b, i);
  }
  for (int lane = 0; lane < 32; ++lane) {
    const auto& of = *static_cast<const MmaLane*>(lanes[lane]);
    for (int i = 0; i < 4; ++i) {
      const float *row = a[lane / 4 + i / 2 * 8], *column = b[lane % 4 * 2 + i % 2];
      float sum = 0.0f;
      for (int k = 0; k < 16; ++k) sum += row[k] * column[k];
      of.c[i] += sum;
    }
  }
}

template <typename T>
void mma_16816(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  MmaLane mine{c, a, b};
  together(mma_of_warp<T>, &mine);
}

struct MatrixLane {
  uint32_t* found;
  const void* row;
};

template <bool kTurned>
void ldmatrix_of_warp(void* const* lanes) {
  for (int lane = 0; lane < 32; ++lane)
    for (int matrix = 0; matrix < 4; ++matrix) {
      uint16_t two[2];
      for (int i = 0; i < 2; ++i) {
        const int along = lane % 4 * 2 + i, row = kTurned ? along : lane / 4;
        const void* from = static_cast<const MatrixLane*>(lanes[matrix * 8 + row])->row;
        two[i] = static_cast<const uint16_t*>(from)[kTurned ? lane / 4 : along];
      }
      std::memcpy(static_cast<MatrixLane*>(lanes[lane])->found + matrix, two, sizeof(two));
    }
}

template <bool kTurned>
void ldmatrix_x4(uint32_t (&found)[4], const void* row) {
  if (reinterpret_cast<uintptr_t>(row) % 16 != 0) stop("ldmatrix of a row that is not aligned");
  MatrixLane mine{found, row};
  together(ldmatrix_of_warp<kTurned>, &mine);
}

// Copies of the running thread. What they are to replace is NaN from the start.
void copy_16(void* target, const void* source, int bytes);
void copy_commit();
void copy_wait(int pending);

}  // namespace simt
