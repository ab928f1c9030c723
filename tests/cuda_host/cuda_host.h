#pragma once
// CUDA's words for kernels' text on fibers (fibers/fibers.h). What the text writes in PTX lies in
// headers of its own; instructions/ has them in C++ and comes first among the folders that includes
// are looked up in. Variables that are __shared__ are static here, the same for all blocks of a
// cluster: kernels launched as clusters have dynamic shared memory only.

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <utility>
#include <vector>

#include "fibers/fibers.h"

#define __global__
#define __device__
#define __host__
#define __constant__ static const
#define __shared__ static
#define __forceinline__ inline
#define __noinline__ inline
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __grid_constant__
#define __align__(n) alignas(n)

using uint3 = gyre::fibers::Index;
struct dim3 : uint3 {
  dim3(unsigned int a = 1, unsigned int b = 1, unsigned int c = 1) : uint3{a, b, c} {}
};
struct alignas(16) uint4 {
  unsigned int x, y, z, w;
};
struct alignas(8) uint2 {
  unsigned int x, y;
};
struct alignas(8) int2 {
  int x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
inline uint4 make_uint4(unsigned int x, unsigned int y, unsigned int z, unsigned int w) {
  return {x, y, z, w};
}
inline uint2 make_uint2(unsigned int x, unsigned int y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }

inline uint3 &threadIdx = gyre::fibers::thread_index, &blockIdx = gyre::fibers::block_index;
inline uint3 &blockDim = gyre::fibers::block_size, &gridDim = gyre::fibers::grid_size;

namespace gyre::cuda_host {

using namespace fibers;

// The command ahead, which has not begun; null: it has ended. It runs when all threads of a block
// wait for it, so that what they read early is as old as it can be. So is what copies read that
// have begun.
inline std::function<void()> command_ahead;

inline void pass_pdl_wait() {
  block->running->pdl_waited = true;
  if (command_ahead == nullptr) return;
  for (std::vector<Copy>& group : block->running->copies) {
    for (Copy& copy : group) {
      const auto* const from = static_cast<const unsigned char*>(copy.from);
      if (from != nullptr) copy.read.assign(from, from + copy.bytes);
    }
  }
  wait(block->pdl_wait);
  if (command_ahead != nullptr) std::exchange(command_ahead, nullptr)();
}

// Copies that do not wait: they come when they are waited for, and until then nobody knows what is
// there.
inline void copy_later(unsigned char* to, const void* from, size_t bytes) {
  require_pdl_wait();
  std::memset(to, 0xAB, bytes);
  auto& groups = block->running->copies;
  if (groups.empty()) groups.emplace_back();
  groups.back().push_back({to, from, bytes});
}
inline void close_copies() {
  auto& groups = block->running->copies;
  groups.resize(std::max<size_t>(groups.size(), 1) + 1);
}
inline void wait_for_copies(size_t left) {
  auto& groups = block->running->copies;
  while (groups.size() > left + 1) {
    for (const Copy& copy : groups.front()) {
      const void* const from = copy.read.empty() ? copy.from : copy.read.data();
      if (copy.from != nullptr) std::memcpy(copy.to, from, copy.bytes);
      if (copy.from == nullptr) std::memset(copy.to, 0, copy.bytes);
    }
    groups.erase(groups.begin());
  }
}

}  // namespace gyre::cuda_host

#include "device_functions.h"
