#pragma once
// The CUDA attention kernels as host code.

#include <cstdint>

namespace gyre::test {

struct HostLaunch {
  const uint32_t (&grid)[3];
  uint32_t threads, shared_bytes;
};

using HostKernel = void (*)(const void* params, const uint64_t* args, const HostLaunch& launch);

// Null: not among those that were compiled; every format is, alone and in some pairs.
HostKernel host_attention(uint32_t k_format, uint32_t v_format);
HostKernel host_attention_decode(uint32_t k_format, uint32_t v_format, uint32_t head_dim,
                                 uint32_t value_dim, uint32_t rows, uint32_t cluster);
HostKernel host_attention_decode_paged(uint32_t k_format, uint32_t v_format, uint32_t head_dim,
                                       uint32_t rows, bool one_page);
// Kernels over pages are told that what they may read before the command ahead has ended.
void allow_early_reads(bool allow);
void host_attention_schedule(const void* params, const uint64_t* args, const HostLaunch& launch);
// The logarithm of a group's keys in the schedule of a sequence of `length` keys.
uint32_t host_schedule_shift(uint64_t fewest_keys, uint64_t most_groups, uint32_t length);
// For the GPU class of AttentionRowsSpec.
HostKernel host_attention_many_rows(uint32_t k_format, uint32_t v_format, uint32_t k_dim,
                                    uint32_t v_dim, uint32_t gpu);
HostKernel host_attention_merge(uint32_t out_dtype);

}  // namespace gyre::test
