#pragma once
// Requests as a server sees them over time. A request either goes on with a conversation: its
// prompt is the system prompt, everything said so far, and the new message. Or it names the blocks
// of its prompt, as Mooncake's traces do: the same number is the same text behind the same blocks.

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

namespace gyre::bench {

constexpr uint64_t kTraceBlockTokens = 512;

struct TraceRequest {
  double at = 0;  // seconds since the trace began
  uint64_t conversation = 0;
  uint64_t system = 0;  // which system prompt; the same number is the same text
  uint64_t system_tokens = 0;
  uint64_t user_tokens = 0;  // with blocks: of the whole prompt
  uint64_t answer_tokens = 0;
  std::vector<uint64_t> blocks{};  // of kTraceBlockTokens each, the last may be shorter
};

using Trace = std::vector<TraceRequest>;  // in the order of time

// chat: one to six requests, pauses as of people, a system prompt of 512 tokens. agent: 8 to 48
// short turns with tools between them, a system prompt of 8192 tokens with the tools' texts.
enum class TraceLoad : uint8_t { chat, agent };

// Conversations begin at random, `per_second` on average, for `seconds`; lengths: many short, some
// long.
struct TraceRecipe {
  TraceLoad load = TraceLoad::chat;
  double seconds = 60, per_second = 1;
  uint64_t systems = 3;
  std::optional<uint64_t> system_tokens{};  // if not given, the load's
  uint32_t seed = 1;
};

Trace make_trace(const TraceRecipe& recipe);

// Prompts by blocks, each request by itself. What blocks cannot say is lost: that a prompt
// shares part of a block with another.
Trace in_blocks(const Trace& trace);

// Tokens of the longest request, its answer included.
uint64_t longest_request(const Trace& trace);

// What a prompt is made of. A text is numbered; the same number is the same tokens.
std::vector<int32_t> block_prompt(const TraceRequest& request);
void append_text(std::vector<int32_t>& tokens, uint64_t text, uint64_t count);
int32_t token_of(uint64_t text, uint64_t index);
// What a conversation's prompt has behind what was said so far. `number` is the request's.
void append_message(std::vector<int32_t>& tokens, const TraceRequest& request, uint64_t number);
// Never the number of a block.
inline uint64_t answer_text(uint64_t number) { return number << 1 | uint64_t{1} << 62; }

}  // namespace gyre::bench
