#include "simulate.h"

#include <algorithm>
#include <cmath>
#include <deque>
#include <map>
#include <optional>
#include <utility>

#include "gpu_timing.h"
#include "gyre/gyre.h"
#include "machine_kernels.h"
#include "runtime/dry_device.h"
#include "runtime/internals.h"
#include "runtime/require.h"
#include "timing.h"

namespace gyre::bench {
namespace {

using Tokens = std::vector<int32_t>;

constexpr uint64_t kSamples = 2000;  // of a run, about

// A request on its way: waiting, reading its prompt, or answering.
struct Request {
  const TraceRequest* from;
  uint64_t text = 0;                     // numbers the answer's tokens
  Tokens tokens{};                       // the prompt, then the answer as far as it is there
  uint64_t prompt = 0;                   // tokens of the prompt
  uint64_t prefill = 0;                  // the same, and tokens that a preempted answer had
  bool counted = false;                  // its prompt, in the hit rate: a preempted one comes again
  double newest = 0, pause = 0;          // time of its newest token; the longest between two tokens
  std::optional<KvSequence> sequence{};  // while it runs

  uint64_t done() const { return sequence->length(); }
  bool reads_prompt() const { return done() < prefill; }
  uint64_t end() const { return prompt + from->answer_tokens; }
};

class Server {
 public:
  // `longest`: tokens of a request.
  Server(const Device& device, const SimulateOptions& options, size_t format, uint64_t pages,
         uint64_t longest)
      : device_(device),
        options_(options),
        kv_gbps_(options.kv_rate(format)),
        pool_(device, pool_options(options, options.formats[format], pages)),
        batch_(pool_, {.max_sequences = options.users,
                       .max_tokens = options.step_tokens,
                       .max_kv_length = std::min(pages * options.page_tokens, longest)}),
        encoder_(device) {
    if (kv_gbps_ == 0) step_ = record();
    result_.formats = options.formats[format];
    result_.pages = pages;
    result_.page_bytes = pool_.describe().groups[0].page_bytes;
  }

  SimulateResult run(const Trace& trace,
                     const std::function<void(const std::string&, double)>& progress) {
    result_.requests = trace.size();
    sample_seconds_ = trace.back().at / static_cast<double>(kSamples);
    const std::string name = result_.formats.label();
    while (next_ < trace.size() || !waiting_.empty() || !running_.empty()) {
      if (waiting_.empty() && running_.empty()) now_ = std::max(now_, trace[next_].at);
      for (; next_ < trace.size() && trace[next_].at <= now_; ++next_)
        waiting_.push_back({.from = &trace[next_], .text = next_});
      admit();
      if (running_.empty()) continue;  // whoever came was refused
      run_step();
      progress(name, static_cast<double>(result_.finished + result_.refused) /
                         static_cast<double>(trace.size()));
    }
    result_.seconds = now_;
    result_.evictions = pool_.describe().evictions;
    if (result_.busy_seconds > 0) result_.mean_users = user_seconds_ / result_.busy_seconds;
    result_.held_users =
        full_seconds_ > 0 ? full_user_seconds_ / full_seconds_ : result_.mean_users;
    if (result_.busy_seconds > 0) result_.full_part = full_seconds_ / result_.busy_seconds;
    result_.wait_p50 = quantile(waits_, 0.5);
    result_.wait_p99 = quantile(waits_, 0.99);
    result_.pause_p50 = quantile(pauses_, 0.5);
    result_.pause_p99 = quantile(pauses_, 0.99);
    return std::move(result_);
  }

 private:
  static KvPoolOptions pool_options(const SimulateOptions& o, const FormatPair& formats,
                                    uint64_t pages) {
    return {.kv_heads = o.kv_heads,
            .head_dim = o.head_dim,
            .layers = std::vector<KvLayer>(o.layers, {.k = formats.k, .v = formats.v}),
            .pages = pages,
            .page_tokens = o.page_tokens,
            .sequences = o.users,
            .step_tokens = o.step_tokens};
  }

  // One graph for every step.
  Graph record() {
    const uint64_t rows = options_.step_tokens;
    const Tensor k = noise_tokens(device_, rows, options_.kv_heads, options_.head_dim),
                 q = noise_tokens(device_, rows, options_.heads, options_.head_dim),
                 out = device_.tensor(DType::f16, q.shape());
    batch_.record();
    for (uint64_t layer = 0; layer < options_.layers; ++layer) {
      batch_.append(encoder_, layer, k, k);
      batch_.attend(encoder_, layer, {.q = q, .out = out});
    }
    Graph graph = encoder_.instantiate();
    batch_.end_step();
    return graph;
  }

  uint64_t pages_for(uint64_t tokens) const {
    return (tokens + options_.page_tokens - 1) / options_.page_tokens;
  }

  // The least time that this part of all requests does not exceed.
  static double quantile(std::vector<double>& seconds, double part) {
    if (seconds.empty()) return 0;
    std::sort(seconds.begin(), seconds.end());
    const double rank = std::ceil(part * static_cast<double>(seconds.size()));
    return seconds[static_cast<size_t>(std::max(1.0, rank)) - 1];
  }

  // The prompt that the trace names, or what was said so far and the new message. It stays while
  // the request waits: its conversation does not go on without it.
  void make_prompt(Request& request) {
    if (request.prompt == 0) {
      const TraceRequest& from = *request.from;
      if (from.blocks.empty()) {
        request.tokens = history_[from.conversation];
        append_message(request.tokens, from, request.text);
      } else {
        request.tokens = block_prompt(from);
      }
      request.prompt = request.tokens.size();
    }
    request.prefill = request.tokens.size();
  }

  bool conversation_runs(uint64_t conversation) const {
    return std::any_of(running_.begin(), running_.end(),
                       [&](const Request& r) { return r.from->conversation == conversation; });
  }

  // That the prompts of those who run still take.
  uint64_t promised_pages() const {
    uint64_t pages = 0;
    for (const Request& request : running_)
      if (request.reads_prompt()) pages += pages_for(request.prefill) - pages_for(request.done());
    return pages;
  }

  // First come, first served, as far as there is room for the prompts. Where there is none, there
  // is none before somebody leaves.
  void admit() {
    while (!waiting_.empty() && running_.size() < options_.users && !full_) {
      const auto found = std::find_if(waiting_.begin(), waiting_.end(), [&](const Request& r) {
        return !conversation_runs(r.from->conversation);
      });
      if (found == waiting_.end()) return;
      make_prompt(*found);
      if (pages_for(found->end()) > result_.pages) {
        ++result_.refused;
        waiting_.erase(found);
        continue;
      }
      // The last token is always computed: its output is the answer's first token.
      KvSequence sequence = options_.share_prefixes
                                ? pool_.match(std::span(found->tokens).first(found->prefill - 1))
                                : pool_.sequence();
      const KvGroupInfo group = pool_.describe().groups[0];  // without what was matched
      const uint64_t missing = pages_for(found->prefill) - pages_for(sequence.length());
      full_ = !running_.empty() &&
              missing + promised_pages() + running_.size() > group.free + group.cached;
      if (full_) return;
      if (!found->counted) {
        result_.prompt_tokens += found->prompt;
        result_.hit_tokens += sequence.length();
        found->counted = true;
      }
      found->sequence.emplace(std::move(sequence));
      running_.push_back(std::move(*found));
      waiting_.erase(found);
    }
  }

  // Answers first, a token each; prompts take what is left of the step.
  std::vector<KvStep> plan() {
    std::vector<KvStep> steps;
    uint64_t left = options_.step_tokens;
    for (Request& request : running_) {
      if (request.reads_prompt() || left == 0) continue;
      steps.push_back({*request.sequence, 1, false});
      --left;
    }
    for (Request& request : running_) {
      if (!request.reads_prompt() || left == 0) continue;
      const uint64_t count = std::min(left, request.prefill - request.done());
      steps.push_back({*request.sequence, count, true});
      left -= count;
    }
    return steps;
  }

  // The pool is full: the request that came last gives its pages back. Later its prompt and what it
  // has answered are computed again, as one prompt.
  void preempt() {
    require(running_.size() > 1, "simulate: one request needs more than the pool");
    Request request = std::move(running_.back());
    running_.pop_back();
    request.sequence.reset();
    waiting_.push_front(std::move(request));
    ++result_.preemptions;
    full_ = true;
  }

  std::vector<KvStep> begin_step() {
    for (;;) {
      std::vector<KvStep> steps = plan();
      try {
        batch_.begin_step(encoder_, steps);
        return steps;
      } catch (const Error& error) {
        if (error.code() != ErrorCode::out_of_memory) throw;
      }
      preempt();
    }
  }

  void run_step() {
    const auto begin = std::chrono::steady_clock::now();
    const std::vector<KvStep> steps = begin_step();
    encoder_.submit();
    double seconds = options_.step_ms * 1e-3;
    if (step_) {
      step_->replay().wait();
      batch_.end_step();
      seconds += us_since(begin) * 1e-6;
    } else {
      batch_.end_step(KvStepEnd::captured);
    }
    // A chunk of a prompt reads the keys before it once.
    for (const KvStep& step : steps) {
      seconds += static_cast<double>(step.tokens) * options_.token_us * 1e-6;
      if (!step_) seconds += static_cast<double>(step.sequence.length()) * token_seconds();
    }
    count_step(seconds);
    finish_requests();
  }

  // The time of one token's keys and values at the given rate.
  double token_seconds() const {
    return static_cast<double>(result_.page_bytes) / static_cast<double>(options_.page_tokens) /
           (kv_gbps_ * 1e9);
  }

  void count_step(double seconds) {
    const auto users = static_cast<double>(running_.size());
    now_ += seconds;
    ++result_.steps;
    result_.busy_seconds += seconds;
    user_seconds_ += seconds * users;
    if (full_) full_seconds_ += seconds, full_user_seconds_ += seconds * users;
    result_.max_users = std::max<uint64_t>(result_.max_users, running_.size());
    if (!result_.samples.empty() && now_ < result_.samples.back().at + sample_seconds_) return;
    const KvPoolInfo pool = pool_.describe();
    const KvGroupInfo& group = pool.groups[0];
    result_.max_shared = std::max(result_.max_shared, group.shared);
    result_.samples.push_back({now_, running_.size(), waiting_.size(), group.used, group.shared,
                               group.cached, pool.evictions, result_.hit_rate(),
                               std::exchange(longest_wait_, 0), std::exchange(longest_pause_, 0)});
  }

  void finish_requests() {
    for (Request& request : running_) {
      if (request.reads_prompt()) continue;
      if (request.tokens.size() == request.prompt) {
        publish(request);
        waits_.push_back(now_ - request.from->at);
        longest_wait_ = std::max(longest_wait_, waits_.back());
      } else {
        request.pause = std::max(request.pause, now_ - request.newest);
        longest_pause_ = std::max(longest_pause_, now_ - request.newest);
      }
      request.newest = now_;
      request.tokens.push_back(
          token_of(answer_text(request.text), request.tokens.size() - request.prompt));
      if (request.done() < request.end()) continue;
      request.tokens.resize(request.done());
      publish(request);
      pauses_.push_back(request.pause);
      result_.answer_tokens += request.from->answer_tokens;
      if (request.from->blocks.empty())
        history_[request.from->conversation] = std::move(request.tokens);
      request.sequence.reset();
      ++result_.finished;
      full_ = false;
    }
    std::erase_if(running_, [](const Request& r) { return !r.sequence.has_value(); });
  }

  void publish(const Request& request) const {
    if (options_.share_prefixes) pool_.publish(*request.sequence, request.tokens);
  }

  const Device& device_;
  const SimulateOptions& options_;
  double kv_gbps_;  // 0: runs
  KvPool pool_;
  KvBatch batch_;
  Encoder encoder_;
  std::optional<Graph> step_;  // none: nothing runs
  size_t next_ = 0;            // of the trace
  bool full_ = false;          // requests wait for pages
  double now_ = 0, user_seconds_ = 0, full_seconds_ = 0, full_user_seconds_ = 0;
  double sample_seconds_ = 0;
  double longest_wait_ = 0, longest_pause_ = 0;  // since the last sample
  std::deque<Request> waiting_;
  std::vector<Request> running_;
  std::map<uint64_t, Tokens> history_;  // of conversations
  std::vector<double> waits_, pauses_;
  SimulateResult result_;
};

}  // namespace

std::vector<SimulateResult> simulate(
    const SimulateOptions& options, const Trace& trace,
    const std::function<void(const std::string&, double)>& progress) {
  check(options);
  Device device =
      options.device == "cpu" ? open_cpu(options.threads) : Device::open(options.device);
  if (!options.kv_gbps.empty()) device = device_of(std::make_shared<DryDevice>(impl_of(device)));
  std::vector<SimulateResult> results;
  for (size_t format = 0; format < options.formats.size(); ++format) {
    Server server(device, options, format, pool_pages(options, options.formats[format]),
                  longest_request(trace));
    results.push_back(server.run(trace, progress));
  }
  return results;
}

}  // namespace gyre::bench
