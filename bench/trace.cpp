#include "trace.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <random>
#include <span>
#include <unordered_map>

#include "runtime/require.h"

namespace gyre::bench {
namespace {

// A length around a median: most within a factor of three, a few ten times as long.
class Lengths {
 public:
  Lengths(double median, double spread) : distribution_(std::log(median), spread) {}
  uint64_t operator()(std::mt19937& random) {
    constexpr double kMax = 1 << 16;
    return static_cast<uint64_t>(std::clamp(distribution_(random), 1.0, kMax));
  }

 private:
  std::lognormal_distribution<double> distribution_;
};

// What a load's conversations are like.
struct Habits {
  uint64_t system_tokens;
  uint64_t least_turns, max_turns;
  double turn_end;  // probability that a conversation ends behind its least turns
  double least_pause, mean_pause;
  double user_median, user_spread, answer_median, answer_spread;
};

Habits habits_of(TraceLoad load) {
  if (load == TraceLoad::agent) return {8192, 8, 48, 0.08, 0.3, 1.5, 180, 1.1, 60, 0.8};
  return {512, 1, 6, 0.45, 2, 12, 60, 1.0, 150, 0.7};
}

uint64_t hash_of(uint64_t parent, std::span<const int32_t> tokens) {
  uint64_t hash = parent ^ 0x9E3779B97F4A7C15u;
  for (const int32_t token : tokens)
    hash = (hash ^ static_cast<uint64_t>(token)) * 0xBF58476D1CE4E5B9u + (hash >> 29);
  return hash;
}

}  // namespace

Trace make_trace(const TraceRecipe& recipe) {
  require(recipe.seconds > 0 && recipe.per_second > 0 && recipe.systems != 0,
          "trace: seconds, per_second and systems must be more than 0");
  constexpr double kMaxConversations = 1e6;
  const double expected = recipe.seconds * recipe.per_second;
  require(expected <= kMaxConversations, "trace: ", recipe.per_second,
          " conversations a second for ", recipe.seconds, " s are ", expected, ", at most ",
          kMaxConversations, " can be made up");
  const Habits habits = habits_of(recipe.load);
  std::mt19937 random(recipe.seed);
  std::exponential_distribution<double> next(recipe.per_second), pause(1.0 / habits.mean_pause);
  std::geometric_distribution<uint64_t> turns(habits.turn_end);
  std::uniform_int_distribution<uint64_t> system(0, recipe.systems - 1);
  Lengths user(habits.user_median, habits.user_spread),
      answer(habits.answer_median, habits.answer_spread);
  Trace trace;
  uint64_t conversation = 0;
  for (double begin = next(random); begin < recipe.seconds; begin += next(random)) {
    const uint64_t prompt = system(random),
                   count = std::min(turns(random) + habits.least_turns, habits.max_turns);
    double at = begin;
    for (uint64_t turn = 0; turn < count; ++turn) {
      const uint64_t said = user(random);
      trace.push_back({at, conversation, prompt,
                       recipe.system_tokens.value_or(habits.system_tokens), said, answer(random)});
      at += habits.least_pause + pause(random);
    }
    ++conversation;
  }
  std::stable_sort(trace.begin(), trace.end(),
                   [](const TraceRequest& a, const TraceRequest& b) { return a.at < b.at; });
  return trace;
}

int32_t token_of(uint64_t text, uint64_t index) {
  uint64_t x = text * 0x9E3779B97F4A7C15u + index;
  x = (x ^ x >> 31) * 0xBF58476D1CE4E5B9u;
  return static_cast<int32_t>((x ^ x >> 29) & 0x1FFFF);
}

void append_text(std::vector<int32_t>& tokens, uint64_t text, uint64_t count) {
  for (uint64_t i = 0; i < count; ++i) tokens.push_back(token_of(text, i));
}

void append_message(std::vector<int32_t>& tokens, const TraceRequest& request, uint64_t number) {
  if (tokens.empty()) append_text(tokens, ~request.system, request.system_tokens);
  append_text(tokens, (number << 1) + 1, request.user_tokens);
}

std::vector<int32_t> block_prompt(const TraceRequest& request) {
  std::vector<int32_t> tokens;
  tokens.reserve(request.user_tokens);
  for (const uint64_t block : request.blocks)
    append_text(tokens, block, std::min(kTraceBlockTokens, request.user_tokens - tokens.size()));
  return tokens;
}

Trace in_blocks(const Trace& trace) {
  std::map<uint64_t, std::vector<int32_t>> said;  // by conversation
  std::unordered_map<uint64_t, uint64_t> known;   // blocks by what they and those before them say
  Trace made;
  for (size_t i = 0; i < trace.size(); ++i) {
    if (!trace[i].blocks.empty()) {
      made.push_back(trace[i]);
      continue;
    }
    std::vector<int32_t>& tokens = said[trace[i].conversation];
    append_message(tokens, trace[i], i);
    TraceRequest request{trace[i].at, i, 0, 0, tokens.size(), trace[i].answer_tokens};
    uint64_t hash = 0;
    for (size_t at = 0; at < tokens.size(); at += kTraceBlockTokens) {
      const size_t count = std::min<size_t>(kTraceBlockTokens, tokens.size() - at);
      hash = hash_of(hash, std::span(tokens).subspan(at, count));
      request.blocks.push_back(known.try_emplace(hash, known.size()).first->second);
    }
    append_text(tokens, answer_text(i), trace[i].answer_tokens);
    made.push_back(std::move(request));
  }
  return made;
}

uint64_t longest_request(const Trace& trace) {
  std::map<uint64_t, uint64_t> said;
  uint64_t longest = 0;
  for (const TraceRequest& request : trace) {
    uint64_t tokens = request.user_tokens + request.answer_tokens;
    if (request.blocks.empty()) {
      uint64_t& all = said.try_emplace(request.conversation, request.system_tokens).first->second;
      tokens = all += tokens;
    }
    longest = std::max(longest, tokens);
  }
  return longest;
}

}  // namespace gyre::bench
