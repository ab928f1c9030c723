#pragma once
// A server in small: requests of a trace go through a pool of pages, with continuous batching,
// chunked prompts and the prefix index. Pages, prefixes and steps are the library's own. The KV
// path runs for real, or takes the time that a rate gives it; the rest of a model takes a time that
// is given.

#include <functional>
#include <string>
#include <vector>

#include "format_pair.h"
#include "gyre/kv_pool.h"
#include "trace.h"

namespace gyre::bench {

struct SimulateOptions {
  std::string device = "cpu";
  uint32_t threads = 0;  // CPU
  uint64_t heads = 32, kv_heads = 8, head_dim = 128, layers = 4;
  std::vector<FormatPair> formats = {{KvFormat::f16, KvFormat::f16},
                                     {KvFormat::tq8, KvFormat::tq4}};
  uint64_t memory = uint64_t{256} << 20;  // bytes of the pool, the same for every format
  uint64_t page_tokens = 64;
  uint64_t users = 32;         // at most at once
  uint64_t step_tokens = 256;  // at most in a step, prompts and answers together
  bool share_prefixes = true;
  // The rest of a step: so long, and so long for each of its tokens.
  double step_ms = 0, token_us = 0;
  // Empty: the KV path runs on the device. Otherwise nothing runs and no memory is taken: a step
  // reads the keys and values of its sequences at this rate. One for each format, or one for all.
  std::vector<double> kv_gbps{};

  double kv_rate(size_t format) const {
    return kv_gbps.empty() ? 0 : kv_gbps[kv_gbps.size() == 1 ? 0 : format];
  }
};

struct SimulateSample {
  double at = 0;  // seconds of the trace
  uint64_t users = 0, waiting = 0;
  uint64_t used = 0, shared = 0, cached = 0;  // pages
  uint64_t evictions = 0;                     // so far
  double hit_rate = 0;                        // so far
  double wait = 0, pause = 0;  // seconds, the longest of those that ended since the sample before
};

struct SimulateResult {
  FormatPair formats;
  uint64_t pages = 0, page_bytes = 0;
  uint64_t requests = 0, finished = 0, refused = 0;  // refused: longer than the pool
  uint64_t prompt_tokens = 0, hit_tokens = 0, answer_tokens = 0;
  uint64_t steps = 0, preemptions = 0, evictions = 0, max_users = 0, max_shared = 0;
  double mean_users = 0;    // over the time in which somebody was served
  double full_part = 0;     // of busy_seconds, in which requests waited for pages
  double held_users = 0;    // mean in that time; if there is none, mean_users
  double busy_seconds = 0;  // in steps
  double seconds = 0;       // until the last answer
  // Seconds from arrival to the first token of the answer: of half of the requests at most, of all
  // but one in a hundred.
  double wait_p50 = 0, wait_p99 = 0;
  // The longest time between two tokens of a request's answer, preemption included.
  double pause_p50 = 0, pause_p99 = 0;
  std::vector<SimulateSample> samples;

  // Whether the pool was the limit, so that held_users says how many it holds.
  bool was_full() const { return full_part >= 0.25; }
  double hit_rate() const;
  double tokens_per_second() const;  // computed, of prompts and answers, per busy second
};

void check(const SimulateOptions& options);
uint64_t pool_pages(const SimulateOptions& options, const FormatPair& formats);

// One result for each of the formats, over the same trace.
std::vector<SimulateResult> simulate(
    const SimulateOptions& options, const Trace& trace,
    const std::function<void(const std::string& what, double done)>& progress);

}  // namespace gyre::bench
