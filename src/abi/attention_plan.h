#pragma once
// What attention asks a backend, and what the backend answers. Host only: no kernel reads them.
#include <bit>

#include "abi/attention_schedule.h"

namespace gyre::abi {

struct AttentionPlan;

// One command of attention: queries over the keys of one cache.
struct AttentionProblem {
  using Plan = AttentionPlan;

  uint64_t tokens;
  uint64_t heads;
  uint64_t kv_heads;
  uint64_t capacity;   // slots of the cache
  uint64_t keys;       // that the queries see at most, when the command runs
  uint64_t key_bytes;  // of K and V of one key and KV head, scales included
  uint64_t addresses;  // of codes and scales, or-ed: the alignment they share
  uint64_t splits;     // of the keys, with `states`; 0: the device chooses
  KvCacheLayout k;
  KvCacheLayout v;
  uint32_t q_dtype;    // DType
  uint32_t out_dtype;  // DType; f32 with `states`
  uint32_t states;     // 1: the splits' partial states are wanted, not the output
  uint32_t tree_mask;  // 1: a tree mask over the newest keys
  // With pages: `tokens` and `keys` are upper bounds, of the batch and of a sequence.
  uint64_t sequences;    // at most; 0: one cache
  uint64_t page_stride;  // bytes
  uint32_t page_tokens;
  uint32_t max_query_length;  // of a sequence
  AttentionPhase phase;       // of the sequences that the plan is for
  uint32_t latent;            // AttentionParams::latent
  uint32_t keeps_scratch;     // 1: the caller keeps what the plan takes, from call to call
  uint32_t unused;
};

enum class AttentionKernel : uint32_t {
  attention,
  attention_decode,
  attention_many_rows,
  attention_latent  // in kLatentParts commands: AttentionLatentSpec
};

// Who reduces the splits' partial states to the output: nobody, because there is one split or the
// states are what is wanted; the blocks of the kernel itself, to the output or to one state of a
// row (`partial` is its scratch memory then); attention_merge after it or, over pages, the kernel
// once more (kAttentionMerged).
enum class AttentionReduce : uint32_t { none, in_kernel, separate };

// How a kernel over pages wants its work listed; see AttentionScheduleParams.
struct AttentionSchedulePlan {
  AttentionCut group;
  uint32_t blocks;  // 0: it reads no schedule
  uint32_t rows;
};

struct AttentionPlan {
  uint64_t spec;  // the kernel's pipeline key
  // Commands of the same kernel over the same arguments, ahead of it and behind it: their keys; 0:
  // there is none.
  uint64_t ahead, behind;
  uint64_t splits;          // of the keys, at least 1
  uint64_t scratch_floats;  // of the argument `partial`, zeros when new; 0: no argument
  uint64_t unpacked_room, unpacked_work;  // AttentionParams'
  uint32_t fewest_split_keys;             // in a split, where the device counts the keys
  AttentionKernel kernel;
  AttentionReduce reduce;
  // Rows of a KV head from which on the device has a kernel for the phase `drafts`, whose plan this
  // is; 0: it has none.
  uint32_t drafts;
  // Sequences of at most this many rows need a phase of their own: the kernel for more rows would
  // give them other bits. 0: none do.
  uint32_t own_rows;
  AttentionSchedulePlan schedule;
};

// (token, query head) pairs of a KV head.
inline uint64_t attention_rows(const AttentionProblem& p) {
  return p.tokens * (p.heads / p.kv_heads);
}

// Coordinates of an output row.
inline uint32_t attention_out_dim(const AttentionProblem& p) {
  return p.latent != 0 ? p.k.head_dim : p.v.head_dim;
}

inline uint64_t attention_state_floats(const AttentionProblem& p, uint64_t splits) {
  return splits * p.tokens * p.heads * (uint64_t{attention_out_dim(p)} + 2);
}

// The kernel for any shape over some splits; attention_merge reduces them.
inline AttentionPlan attention_any_shape_plan(const AttentionProblem& p, uint64_t splits,
                                              uint32_t fewest_split_keys) {
  const bool separate = splits > 1 && p.states == 0;
  AttentionSpec spec{};
  spec.q_dtype = static_cast<uint8_t>(p.q_dtype);
  spec.out_dtype = separate ? uint8_t{0} : static_cast<uint8_t>(p.out_dtype);  // states are f32
  spec.k_format = static_cast<uint8_t>(p.k.format);
  spec.v_format = static_cast<uint8_t>(p.v.format);
  spec.paged = p.sequences != 0 ? 1 : 0;
  spec.latent = p.latent != 0 ? 1 : 0;
  AttentionPlan plan{};
  plan.spec = std::bit_cast<uint64_t>(spec);
  plan.splits = splits;
  plan.scratch_floats = separate ? attention_state_floats(p, splits) : 0;
  plan.fewest_split_keys = fewest_split_keys;
  plan.kernel = AttentionKernel::attention;
  plan.reduce = separate ? AttentionReduce::separate : AttentionReduce::none;
  return plan;
}

// For a device that has one kernel and nothing to choose.
inline AttentionPlan attention_default_plan(const AttentionProblem& p) {
  return attention_any_shape_plan(p, p.splits != 0 ? p.splits : 1, kSplitMultiple);
}

}  // namespace gyre::abi
