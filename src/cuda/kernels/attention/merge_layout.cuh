#pragma once
// attention_merge: how many threads a block has, and what they do. For the kernel and its launch.
#include "abi/types.h"

namespace gyre::cuda {

constexpr uint32_t kMergeThreads = 512;

// Threads that run along the coordinates: whole warps.
constexpr uint32_t merge_columns(uint32_t head_dim) { return (head_dim + 31) / 32 * 32; }
// Groups of them, which share the splits.
constexpr uint32_t merge_groups(uint32_t head_dim) {
  return merge_columns(head_dim) < kMergeThreads ? kMergeThreads / merge_columns(head_dim) : 1;
}
constexpr uint32_t merge_shared_bytes(uint32_t head_dim) {
  return merge_groups(head_dim) * head_dim * 4;
}

}  // namespace gyre::cuda
