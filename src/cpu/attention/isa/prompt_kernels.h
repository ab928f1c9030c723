#pragma once
// Prompts over f16 and bf16 where the machine multiplies whole tiles (AMX): up to 256 keys at a
// time, so that sums stay in tile registers for long. All rows of a work tile share the packed
// block; 32 of them at a time pass through scores, softmax and PV.

#include <cstdint>

namespace gyre::cpu {

constexpr uint32_t kPromptRows = 32;
constexpr uint32_t kPromptKeys = 256;
// Floats from row to row of logits: one more vector, so that rows use different cache sets.
constexpr uint32_t kPromptStride = kPromptKeys + 16;

// Lanes of a block: packed K and V have a limit. Key j of a sequence has lane j % lanes.
constexpr uint32_t prompt_lanes(uint32_t head_dim) {
  return head_dim <= 256 ? kPromptKeys : head_dim <= 512 ? 128 : 64;
}

// A block's rows of K or V by lane; null outside of lanes [begin, end).
struct PromptBlock {
  const uint8_t* rows[kPromptKeys] = {};
  uint32_t begin = 0, end = 0;
};

// The packed operand of a block of K or V.
struct PromptOperand {
  uint8_t* packed = nullptr;
  uint32_t format = 0, head_dim = 0, lanes = 0;
  bool finite = true;  // V: else the operand has zeros in place of what is not
};

// Rows of another block that the next phases read: fetched meanwhile.
struct PromptPrefetch {
  const PromptBlock* block = nullptr;
  uint32_t begin = 0, end = 0, row_bytes = 0;
};

// Up to kPromptRows rows over lanes [begin, end), multiples of 32.
struct PromptRows {
  uint32_t rows = 0, begin = 0, end = 0;
  float* logits = nullptr;  // [kPromptRows][kPromptStride]: scores, logits, then weights in bf16
  PromptPrefetch keys, values;
};

struct PromptKernels {
  void (*pack_keys)(const PromptBlock&, PromptOperand&) = nullptr;
  void (*pack_values)(const PromptBlock&, PromptOperand&) = nullptr;
  // Scores of queries that split_queries made.
  void (*score)(const PromptOperand&, const float* q, const PromptRows&) = nullptr;
  void (*find_max)(const PromptRows&, float* max) = nullptr;
  // Logits become 2^(factor logit - reference); sums are their sums, by row.
  void (*exponentiate)(const PromptRows&, const float* factor, const float* reference,
                       float* sums) = nullptr;
  // acc = acc * rescale + weights V; acc is [rows][head_dim].
  void (*accumulate)(const PromptOperand&, const PromptBlock&, const PromptRows&,
                     const float* rescale, float* acc) = nullptr;
};

}  // namespace gyre::cpu
