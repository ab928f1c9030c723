#include "trace.h"

#include <algorithm>
#include <cmath>
#include <random>

#include "runtime/require.h"

namespace gyre::bench {
namespace {

// A length around a median: most within a factor of three, a few ten times as long.
class Lengths {
 public:
  Lengths(uint64_t median, double spread)
      : distribution_(std::log(static_cast<double>(median)), spread) {}
  uint64_t operator()(std::mt19937& random) {
    constexpr double kMost = 1 << 16;
    return static_cast<uint64_t>(std::clamp(distribution_(random), 1.0, kMost));
  }

 private:
  std::lognormal_distribution<double> distribution_;
};

}  // namespace

Trace make_trace(const TraceRecipe& recipe) {
  require(recipe.seconds > 0 && recipe.per_second > 0 && recipe.systems != 0,
          "trace: seconds, per_second and systems must be more than 0");
  constexpr uint64_t kMostTurns = 6;
  std::mt19937 random(recipe.seed);
  std::exponential_distribution<double> next(recipe.per_second), pause(1.0 / 12);
  std::geometric_distribution<uint64_t> turns(0.45);
  std::uniform_int_distribution<uint64_t> system(0, recipe.systems - 1);
  Lengths user(recipe.user_tokens, 1.0), answer(recipe.answer_tokens, 0.7);
  Trace trace;
  uint64_t conversation = 0;
  for (double begin = next(random); begin < recipe.seconds; begin += next(random)) {
    const uint64_t prompt = system(random), count = std::min(turns(random) + 1, kMostTurns);
    double at = begin;
    for (uint64_t turn = 0; turn < count; ++turn) {
      trace.push_back(
          {at, conversation, prompt, recipe.system_tokens, user(random), answer(random)});
      at += 2 + pause(random);
    }
    ++conversation;
  }
  std::stable_sort(trace.begin(), trace.end(),
                   [](const TraceRequest& a, const TraceRequest& b) { return a.at < b.at; });
  return trace;
}

}  // namespace gyre::bench
