#pragma once

#include "format_classes.h"
#include "gyre_test.h"
#include "op_case.h"
#include "reference.h"

namespace gyre::test {

// One call of attention or attention_partial as numbers; make_case() turns it into memory, call and
// expected contents. Slots outside the bounds hold NaN.
struct AttentionOpCase {
  std::string name;
  DType q = DType::f32, out = DType::f32;
  KvFormat k = KvFormat::f16;
  KvFormat v = KvFormat::f16;
  reference::KvLayout q_layout = reference::KvLayout::token_major;
  reference::KvLayout out_layout = reference::KvLayout::token_major;
  reference::KvLayout cache_layout = reference::KvLayout::head_major;  // dense caches
  uint64_t tokens = 3, heads = 4, kv_heads = 2, k_dim = 64, v_dim = 80, length = 70, capacity = 75;
  uint64_t ring_start = 40;
  bool causal = true;
  uint64_t window = 0;
  float soft_cap = 0;
  float scale_factor = 1;  // of caches in an mlx-native format
  bool lse = true;
  bool lse_by_head = false;  // [heads, tokens] in memory
  bool sink_logits = false, alibi_slopes = false, tree_mask = false;
  uint64_t splits = 0;                   // 0: attention; else attention_partial
  std::optional<uint32_t> commands = 1;  // what the call records; none: the device decides
  bool aligned = false;                  // caches begin where 16 bytes can be copied
  std::string only_with = {};            // OpCase::only_with
  bool latent = false;                   // k_dim: the latent's, v_dim: the rotary part's

  uint64_t q_dim() const { return latent ? k_dim + v_dim : k_dim; }
  uint64_t out_dim() const { return latent ? k_dim : v_dim; }
};

OpCase make_case(const AttentionOpCase& numbers);

// Those for few rows, of attention and of attention_partial.
std::vector<OpCase> attention_decode_cases();
std::vector<OpCase> attention_decode_partial_cases();

// Those for many rows on tensor cores.
std::vector<OpCase> attention_rows_cases();

}  // namespace gyre::test
