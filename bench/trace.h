#pragma once
// Requests of conversations, as a server sees them over time. A conversation's later requests carry
// on from its earlier ones: their prompt is the system prompt, everything said so far, and the new
// message.

#include <cstdint>
#include <vector>

namespace gyre::bench {

struct TraceRequest {
  double at = 0;  // seconds since the trace began
  uint64_t conversation = 0;
  uint64_t system = 0;  // which system prompt; the same number is the same text
  uint64_t system_tokens = 0;
  uint64_t user_tokens = 0;
  uint64_t answer_tokens = 0;
};

using Trace = std::vector<TraceRequest>;  // in the order of time

// Conversations begin at random, `per_second` on average, for `seconds`; each has one to six
// requests with pauses between them, lengths as of chats: many short, some long.
struct TraceRecipe {
  double seconds = 60;
  double per_second = 1;
  uint64_t systems = 3;
  uint64_t system_tokens = 512;
  uint64_t user_tokens = 60;     // median
  uint64_t answer_tokens = 150;  // median
  uint32_t seed = 1;
};

Trace make_trace(const TraceRecipe& recipe);

}  // namespace gyre::bench
