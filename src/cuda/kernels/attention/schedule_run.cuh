#pragma once
// A run of the step schedule (abi/attention_schedule.h) as the kernels that read it see it.
#include "abi/attention_bounds.h"
#include "abi/attention_schedule.h"
#include "cuda/kernels/global_memory.cuh"
#include "cuda/kernels/ptx.cuh"

namespace gyre::cuda {

inline abi::RowMask<int32_t> run_mask(const abi::AttentionParams& p, const abi::AttentionRun& run) {
  abi::RowMask<int32_t> mask = {static_cast<int32_t>(run.length), static_cast<int32_t>(run.tokens),
                                abi::row_window<int32_t>(p.window), p.causal != 0};
  abi::fill_segment(mask, p.segment, p.places, run.tail_begin);
  return mask;
}

// Whether the sequence's length or its place in q changed since the schedule was made.
inline bool is_stale(const Args& args, const abi::AttentionRun& run) {
  using enum abi::AttentionArg;
  return load_bits(args.at[arg_kv_lengths], run.sequence, true) != run.length ||
         load_bits(args.at[arg_cu_seqlens_q], run.sequence, true) != run.first_token;
}

}  // namespace gyre::cuda
