#pragma once
// What `gyre bench serving` measures: one decode step of a batch of sequences over pages, with
// --tokens several draft tokens of each.

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "attention_runs.h"
#include "format_pair.h"

namespace gyre::bench {

// As far as given, beside AttentionChoice's shape. Without any of both, the standard batches.
struct ServingChoice {
  std::optional<uint64_t> batch, page_tokens, shared;

  bool any() const { return batch || page_tokens || shared; }
  std::string first_flag() const;
};

struct ServingShape {
  uint64_t heads = 32, kv_heads = 8, head_dim = 128, page_tokens = 64;
  std::vector<uint64_t> lengths;  // of every sequence
  uint64_t shared = 0;            // tokens of a common prompt: the same pages in every table
  uint64_t tokens = 1;            // queries of every sequence, its newest tokens
  uint64_t rotary_dim = 0;        // AttentionShape's

  // One sequence with `length` keys, not paged.
  AttentionShape linear(uint64_t length) const {
    return {heads, kv_heads, head_dim, length, tokens, rotary_dim};
  }
  uint64_t pages() const;  // in all, shared ones once
  uint64_t longest() const;
  std::string text() const;  // "16 x 4096", "16 ragged, 512 to 16384"
};

// What a row's time stands beside, taken in turns.
enum class ServingAgainst : uint8_t {
  first_format,   // the same batch in the first of the formats
  linear,         // one sequence: the same keys in a linear cache
  pages_of_64,    // the same batch in pages of 64 tokens
  equal_lengths,  // as many sequences and keys, all of one length
  one_by_one,     // a call of attention over a linear cache for each sequence
};

struct ServingRun {
  ServingShape shape;
  std::vector<FormatPair> formats;
  ServingAgainst against = ServingAgainst::first_format;
};

std::vector<ServingRun> serving_runs(const AttentionChoice& attention, const ServingChoice& choice,
                                     bool gpu);

}  // namespace gyre::bench
