#pragma once
// What `gyre bench attention` measures, on the CPU and on a GPU: shapes, each with its formats.

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "format_pair.h"

namespace gyre::bench {

// As far as given. A number that is missing takes the value in the help; without any, the device's
// standard shapes are measured.
struct AttentionChoice {
  std::optional<uint64_t> heads, kv_heads, head_dim, tokens;
  std::vector<uint64_t> contexts;
  std::vector<FormatPair> formats;
  bool latent = false;  // latent attention; pairs of formats are the latent's and the rotary part's

  bool any_shape() const;
  std::string first_flag() const;  // "--heads"; empty where nothing was given
};

struct AttentionShape {
  uint64_t heads = 32, kv_heads = 8, head_dim = 128, context = 0;
  uint64_t tokens = 1;      // queries: the newest tokens of the context; 1 is a decode step
  uint64_t rotary_dim = 0;  // not 0: latent attention, with a latent of head_dim

  bool latent() const { return rotary_dim != 0; }
  uint64_t q_dim() const { return head_dim + rotary_dim; }
  uint64_t v_dim() const { return latent() ? rotary_dim : head_dim; }  // of what V stores
};

constexpr uint64_t kMaxLength = (uint64_t{1} << 31) - 1;  // of a context

constexpr uint64_t kLatentDim = 512, kRotaryDim = 64;  // of every model that has them
// What latent attention is measured in if nothing is given.
std::vector<FormatPair> latent_formats();

// Formats of one shape are measured beside each other and compared with the first.
struct AttentionRun {
  AttentionShape shape;
  std::vector<FormatPair> formats;
  bool errors = true;  // GPU: also compute the error in double precision on the host
};

// Refuses what cannot be measured: heads that KV heads do not divide, more queries than keys, a
// format that cannot store the head dim.
std::vector<AttentionRun> cpu_attention_runs(const AttentionChoice& choice);
std::vector<AttentionRun> gpu_attention_runs(const AttentionChoice& choice);

// Refuses a flag's value that is not from 1 to `limit`, and heads that no kernel has.
void check_range(const char* flag, uint64_t value, uint64_t limit);
void check_heads(const AttentionShape& shape);

// Two products over the keys that each query sees, a multiplication and an addition each.
double attention_flops(const AttentionShape& shape);

}  // namespace gyre::bench
