// What both directions of layer_norm say of a launch, and the longest row they take.
#pragma once
#include "launch.h"

namespace tfm_kernels::layer_norm {

constexpr int kMaxFeatures = 65536;

// Who works on a row: a warp, a block, or a block that walks along it.
enum class Shape { warp_512, warp_1024, block, walk };

struct Config {
  Shape shape;
  int threads;
  int blocks_each;  // of a multiprocessor
};

}  // namespace tfm_kernels::layer_norm
