#pragma once
// What the files of all instruction sets share. Each is compiled with its own instructions, so
// everything here is anonymous: each has its own copy.

#include <cstddef>
#include <cstdint>

#include "cpu/attention/isa/kernels.h"

namespace gyre::cpu {
namespace {

inline constexpr size_t kTile = abi::kKvTile;

// Fetches steps [begin, end) into the second-level cache: the first is full of the working set.
inline void prefetch_steps(const Prefetch& prefetch, size_t begin, size_t end) {
  const uint8_t* const last = prefetch.at + end * prefetch.bytes_per_step;
  for (const uint8_t* at = prefetch.at + begin * prefetch.bytes_per_step; at < last; at += 64)
    __builtin_prefetch(at, 0, 2);
}

}  // namespace
}  // namespace gyre::cpu
