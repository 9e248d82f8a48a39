// CUDA's threads on a CPU: each is a fiber, and a seeded die says which of those that can go on
// does.
//
// Fibers are switched where threads wait for one another (barriers, instructions of a warp) and at
// atomics and fences. So a missing barrier shows as a wrong sum under some seed, a barrier that not
// all threads reach as an error, and a lane that reads from one that is not there too. Blocks run
// several at once, in random order. Shared memory is an allocation of its own, of exactly the size
// that the launch asked for, and starts as NaN.
#pragma once
#include <cstdint>
#include <cstring>
#include <functional>

namespace simt {

struct Dim {
  unsigned x = 1, y = 1, z = 1;
  Dim(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

inline Dim thread, block, block_size, grid_size;  // of the running thread
void* shared();                                   // of its block

bool barrier(bool vote = false);  // __syncthreads; whether any thread of the block voted
void let_others();                // any other thread may run first
uint64_t exchange(unsigned mask, uint64_t value,
                  unsigned lane);  // value of a lane, of those in mask

// An instruction of all 32 lanes: called once, with what each lane brings, when all have come.
void together(void (*instruction)(void* const*), void* mine);
[[noreturn]] void stop(const char* what);  // ends the launch: a GPU would not do this

// Runs body once per thread, with shared memory of at most `allowed` bytes; null, or what went
// wrong.
const char* launch(Dim grid, Dim threads, size_t shared_bytes, size_t allowed,
                   const std::function<void()>& body);
int multiprocessors();

template <typename T>
T shuffle(unsigned mask, T value, unsigned lane) {
  static_assert(sizeof(T) <= sizeof(uint64_t));
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  bits = exchange(mask, bits, lane);
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}

}  // namespace simt
