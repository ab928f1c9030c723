#pragma once
// Attention over pages, also over one segment of a layer's keys at a time: what public attention()
// and KvBatch record.

#include "ops/attention_dispatch.h"

namespace gyre {

// Keys of one layer that lie in pages of one shape.
struct PagedSegment {
  KvPages pages{};
  uint64_t first_entry = 0;   // of a row of the table
  uint64_t ring_entries = 0;  // 0: key j lies in entry j / page_tokens; else modulo ring_entries
  abi::KvSegment segment = abi::kSegmentBody;
  uint64_t sink_tokens = 0, tail = 0;  // RowMask's
  Tensor tail_begin{};                 // i32 [sequences]: RowMask's; undefined: 0
};

struct PagedCall {
  const char* op = nullptr;
  Tensor q{};
  PagedSegment keys{};
  Tensor page_table{}, kv_lengths{}, cu_seqlens_q{}, is_prefill{};  // PagedAttentionInputs'
  Tensor schedule{};                                                // PagedAttentionInputs'
  std::vector<ListedSchedule>* schedules = nullptr;  // that the calls of a list share
  bool keeps_scratch = false;                        // its scratch memory serves later calls, too
  PagedAttentionOptions options{};
};

// Records the call inside the caller's recording. It writes either outputs.out (and lse, with
// sink_logits), or outputs.partial: f32 [1, tokens, heads, v_head_dim + 2], the state of every row,
// for attention_merge. `scratch` grows; a refused call leaves it as it is.
void attend_pages(Recording& recording, const Device& device, const PagedCall& call,
                  const AttentionMergeInputs& outputs, AttendScratch& scratch);

}  // namespace gyre
