#pragma once
// What all kernels do with queries over levels: the factor of a rotation, and integers as bytes.
#include "cuda/kernels/instructions.cuh"

namespace gyre::cuda {

constexpr float inverse_root(uint32_t n) {
  if (n < 64) return n == 16 ? 0.25f : 0.176776695f;
  return n == 64 ? 0.125f : (n == 128 ? 0.0883883476f : (n == 256 ? 0.0625f : 0.0441941738f));
}

// Four integers as two words of bytes: upper ones, rounded as the lower ones have a sign, and
// these.
struct TwoBytePlanes {
  uint32_t upper, lower;

  explicit TwoBytePlanes(const uint32_t (&x)[4]) {
    uint32_t y[4];
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) y[i] = x[i] + 128;
    upper = permute(permute(y[0], y[1], 0x51), permute(y[2], y[3], 0x51), 0x5410);
    lower = permute(permute(x[0], x[1], 0x40), permute(x[2], x[3], 0x40), 0x5410);
  }
};

}  // namespace gyre::cuda
