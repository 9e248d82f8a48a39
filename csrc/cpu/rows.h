// What the host halves of kernels share that multiply rows and weights: arguments as the kernels
// take them, working memory, and how features are dealt out.
#pragma once
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <atomic>

#include "../check.h"
#include "gemm.h"
#include "layer_norm.h"
#include "output.h"
#include "weights.h"

namespace tfm_kernels {

inline void check_vector(const OptionalTensor& t, int64_t n, const at::Tensor& x, const char* op,
                         const char* name) {
  check_shape(t, {n}, op, name);
  TORCH_CHECK(!t || t->scalar_type() == x.scalar_type(), op, ": ", name,
              " must have the dtype of x");
}

// A weight of 8-bit integers (out, width) and the sizes of its rows' steps.
inline void check_int8_weight(const at::Tensor& weight, const at::Tensor& scale, int64_t out,
                              int64_t width, const char* op, const char* name) {
  check_shape(weight, {out, width}, op, name);
  check_shape(scale, {out}, op, name);
  TORCH_CHECK(weight.scalar_type() == at::kChar, op, ": ", name, " must be int8");
  TORCH_CHECK(scale.scalar_type() == at::kFloat, op, ": the steps of ", name, " must be float32");
}

// Rows whose products of integers stay within int32.
inline void check_integer_width(int64_t width, const char* op, const char* name) {
  TORCH_CHECK(width <= (int64_t{1} << 17), op, ": ", name, " must have at most 131072 columns");
}

// x itself, or a copy where its columns do not lie side by side.
inline at::Tensor unit_rows(const at::Tensor& x) {
  return x.size(1) <= 1 || x.stride(1) == 1 ? x : x.contiguous();
}

inline OptionalTensor contiguous(const OptionalTensor& t) {
  return t ? OptionalTensor(t->contiguous()) : std::nullopt;
}

inline const void* pointer(const OptionalTensor& t) { return t ? t->const_data_ptr() : nullptr; }

// Two stretches of working memory in the compute type, each begun on a cache line.
struct Workspace {
  at::Tensor owner;
  char *begin, *middle;
  int64_t item;

  Workspace(const at::Tensor& x, int64_t first_elements, int64_t second_elements)
      : item(x.scalar_type() == at::kDouble ? 8 : 4) {
    const int64_t split = (first_elements * item + 63) / 64 * 64;
    owner = at::empty({split + second_elements * item}, x.options().dtype(at::kByte));
    begin = static_cast<char*>(owner.mutable_data_ptr());
    middle = begin + split;
  }
  void* first(int64_t element) const { return begin + element * item; }
  void* second(int64_t element) const { return middle + element * item; }
};

// Calls body(task, worker) for each task, as threads become free; a worker is one thread's place in
// the working memory.
template <typename Body>
void for_tasks(int64_t tasks, int64_t workers, Body body) {
  std::atomic<int64_t> next = 0;
  at::parallel_for(0, workers, 1, [&](int64_t begin, int64_t end) {
    for (int64_t worker = begin; worker < end; ++worker)
      for (int64_t task = next++; task < tasks; task = next++) body(task, worker);
    gemm_release();
  });
}

// Tiles of rows and strips of up to 512 features as tasks, spread evenly over the threads; fewer
// features at a time where there would be less to do than threads.
struct TileGrid {
  int64_t features, tile, chunk, strips, tasks, workers;

  // Tiles of `most` rows or fewer, in multiples of `step`; features in whole panels of 32.
  TileGrid(int64_t rows, int64_t features, int64_t most, int64_t step, int64_t threads)
      : features(features), tile(round_up(tile_rows(rows, most, threads), step)) {
    const int64_t tiles = ceil_div(rows, tile);
    chunk = std::min<int64_t>(512, round_up(ceil_div(features, ceil_div(threads, tiles)), 32));
    strips = ceil_div(features, std::max<int64_t>(chunk, 1));
    tasks = tiles * strips;
    workers = std::min(tasks, threads);
  }

  struct Place {
    int64_t row, begin, end;
  };
  Place place(int64_t task) const {
    const int64_t begin = task % strips * chunk;
    return {task / strips * tile, begin, std::min(features, begin + chunk)};
  }
};

// Calls body(begin, end, worker) for every worker's share of `features`, in multiples of 16.
template <typename Body>
void for_strips(int64_t features, int64_t workers, Body body) {
  const int64_t strips = ceil_div(features, 16);
  at::parallel_for(0, workers, 1, [&](int64_t first, int64_t last) {
    for (int64_t worker = first; worker < last; ++worker) {
      const int64_t begin = strips * worker / workers * 16;
      const int64_t end = std::min(features, strips * (worker + 1) / workers * 16);
      if (begin < end) body(begin, end, worker);
    }
  });
}

}  // namespace tfm_kernels
