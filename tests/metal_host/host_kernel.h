#pragma once
// Kernels whose MSL text was compiled as C++, by name.
#include <cstdint>

namespace gyre::metal_host {

// One dispatch, as a Metal driver gets it.
struct HostDispatch {
  const void* params;
  void* const* args;   // 16
  uint32_t arguments;  // bit i: argument i is there; bit 16 + i: it begins at a multiple of 16
  uint32_t spec_low, spec_high;
  uint32_t grid[3];
  uint32_t threads, threadgroup_bytes;
};

struct HostKernel {
  const char* name;
  void (*run)(const HostDispatch&);
};

// Before main; not while kernels run.
bool register_kernel(const HostKernel& kernel);
const HostKernel* find_kernel(const char* name);

// Codes and scales that kernels have read.
inline uint64_t cache_bytes_read = 0;

}  // namespace gyre::metal_host
