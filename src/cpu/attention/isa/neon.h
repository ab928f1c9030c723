// What the Arm files of attention share. Each is compiled with its own instructions: everything
// here is theirs alone.
#pragma once

#include <arm_neon.h>

#include <cstddef>
#include <cstdint>

#include "cpu/attention/isa/kernels.h"

namespace gyre::cpu {
namespace {

inline constexpr size_t kTile = abi::kKvTile;

// Into the second cache: the first is full of what is worked on.
inline void fetch(const Prefetch& ahead, size_t begin, size_t end) {
  const uint8_t* const last = ahead.at + end * ahead.bytes_per_step;
  for (const uint8_t* at = ahead.at + begin * ahead.bytes_per_step; at < last; at += 64)
    __builtin_prefetch(at, 0, 2);
}

}  // namespace
}  // namespace gyre::cpu
