#include "simulate.h"

#include <algorithm>
#include <deque>
#include <map>
#include <optional>

#include "gpu_timing.h"
#include "gyre/gyre.h"
#include "machine_kernels.h"
#include "runtime/require.h"
#include "timing.h"

namespace gyre::bench {
namespace {

using Tokens = std::vector<int32_t>;

// Token `index` of a text; the same text has the same tokens.
int32_t token_of(uint64_t text, uint64_t index) {
  uint64_t x = text * 0x9E3779B97F4A7C15u + index;
  x = (x ^ x >> 31) * 0xBF58476D1CE4E5B9u;
  return static_cast<int32_t>((x ^ x >> 29) & 0x1FFFF);
}

void append_text(Tokens& tokens, uint64_t text, uint64_t count) {
  for (uint64_t i = 0; i < count; ++i) tokens.push_back(token_of(text, i));
}

// A request on its way: waiting, reading its prompt, or answering.
struct Request {
  const TraceRequest* from;
  Tokens tokens;                       // the prompt, then the answer as far as it is there
  uint64_t prompt = 0;                 // tokens of the prompt
  uint64_t text = 0;                   // numbers the answer's tokens
  bool counted = false;                // its prompt, in the hit rate: a preempted one comes again
  std::optional<KvSequence> sequence;  // while it runs

  uint64_t done() const { return sequence->length(); }
  bool reads_prompt() const { return done() < prompt; }
  uint64_t end() const { return prompt + from->answer_tokens; }
};

class Server {
 public:
  Server(const Device& device, const SimulateOptions& options, const FormatPair& formats,
         uint64_t pages)
      : device_(device),
        options_(options),
        pool_(device, pool_options(options, formats, pages)),
        batch_(pool_, {.max_sequences = options.users,
                       .max_tokens = options.step_tokens,
                       .max_kv_length = pages * options.page_tokens}),
        encoder_(device),
        step_(record()) {
    result_.formats = formats;
    result_.pages = pages;
    result_.page_bytes = pool_.describe().groups[0].page_bytes;
  }

  SimulateResult run(const Trace& trace,
                     const std::function<void(const std::string&, double)>& progress) {
    result_.requests = trace.size();
    const std::string name = result_.formats.label();
    while (next_ < trace.size() || !waiting_.empty() || !running_.empty()) {
      if (waiting_.empty() && running_.empty()) now_ = std::max(now_, trace[next_].at);
      for (; next_ < trace.size() && trace[next_].at <= now_; ++next_)
        waiting_.push_back({&trace[next_], {}, 0, next_, false, {}});
      admit();
      if (running_.empty()) continue;  // whoever came was refused
      run_step();
      progress(name, static_cast<double>(result_.finished + result_.refused) /
                         static_cast<double>(trace.size()));
    }
    result_.seconds = now_;
    result_.evictions = pool_.describe().evictions;
    if (served_seconds_ > 0) result_.mean_users = user_seconds_ / served_seconds_;
    if (!waits_.empty()) result_.median_wait = median(std::move(waits_));
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

  // What was said so far, and the new message.
  void make_prompt(Request& request) {
    const TraceRequest& from = *request.from;
    request.tokens = history_[from.conversation];
    if (request.tokens.empty()) append_text(request.tokens, ~from.system, from.system_tokens);
    append_text(request.tokens, (request.text << 1) + 1, from.user_tokens);
    request.prompt = request.tokens.size();
  }

  bool conversation_runs(uint64_t conversation) const {
    return std::any_of(running_.begin(), running_.end(),
                       [&](const Request& r) { return r.from->conversation == conversation; });
  }

  // First come, first served, as far as there is room for the prompts.
  void admit() {
    while (!waiting_.empty() && running_.size() < options_.users) {
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
      const KvGroupInfo group = pool_.describe().groups[0];
      // The last token is always computed: its output is the answer's first token.
      KvSequence sequence = pool_.match(std::span(found->tokens).first(found->prompt - 1));
      const uint64_t missing = pages_for(found->prompt) - pages_for(sequence.length());
      if (!running_.empty() && missing + running_.size() > group.free + group.cached) return;
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
      const uint64_t count = std::min(left, request.prompt - request.done());
      steps.push_back({*request.sequence, count, true});
      left -= count;
    }
    return steps;
  }

  // The pool is full: the request that came last gives its pages back and begins again later.
  void preempt() {
    require(running_.size() > 1, "simulate: one request needs more than the pool");
    Request request = std::move(running_.back());
    running_.pop_back();
    request.sequence.reset();
    waiting_.push_front(std::move(request));
    ++result_.preemptions;
  }

  void begin_step() {
    for (;;) {
      const std::vector<KvStep> steps = plan();
      try {
        batch_.begin_step(encoder_, steps);
        return;
      } catch (const Error& error) {
        if (error.code() != ErrorCode::out_of_memory) throw;
      }
      preempt();
    }
  }

  void run_step() {
    const auto begin = std::chrono::steady_clock::now();
    begin_step();
    encoder_.submit();
    step_.replay().wait();
    batch_.end_step();
    const double seconds = us_since(begin) * 1e-6;
    now_ += seconds;
    ++result_.steps;
    result_.busy_seconds += seconds;
    served_seconds_ += seconds;
    user_seconds_ += seconds * static_cast<double>(running_.size());
    sample();
    finish_requests();
  }

  void sample() {
    const KvGroupInfo group = pool_.describe().groups[0];
    result_.most_users = std::max<uint64_t>(result_.most_users, running_.size());
    result_.most_shared = std::max(result_.most_shared, group.shared);
    result_.samples.push_back(
        {now_, running_.size(), waiting_.size(), group.used, group.shared, group.cached});
  }

  void finish_requests() {
    for (Request& request : running_) {
      if (request.reads_prompt()) continue;
      if (request.tokens.size() == request.prompt) {
        pool_.publish(*request.sequence, request.tokens);
        waits_.push_back(now_ - request.from->at);
      }
      request.tokens.push_back(token_of(request.text << 1, request.tokens.size()));
      if (request.done() < request.end()) continue;
      request.tokens.resize(request.done());
      pool_.publish(*request.sequence, request.tokens);
      result_.answer_tokens += request.from->answer_tokens;
      history_[request.from->conversation] = std::move(request.tokens);
      request.sequence.reset();
      ++result_.finished;
    }
    std::erase_if(running_, [](const Request& r) { return !r.sequence.has_value(); });
  }

  const Device& device_;
  const SimulateOptions& options_;
  KvPool pool_;
  KvBatch batch_;
  Encoder encoder_;
  Graph step_;
  size_t next_ = 0;  // of the trace
  double now_ = 0, user_seconds_ = 0, served_seconds_ = 0;
  std::deque<Request> waiting_;
  std::vector<Request> running_;
  std::map<uint64_t, Tokens> history_;  // of conversations
  std::vector<double> waits_;
  SimulateResult result_;
};

uint64_t pages_of(const SimulateOptions& o, const FormatPair& formats) {
  const uint64_t page = o.layers * kv_page_bytes({.k = formats.k,
                                                  .v = formats.v,
                                                  .kv_heads = o.kv_heads,
                                                  .head_dim = o.head_dim,
                                                  .page_tokens = o.page_tokens});
  const uint64_t pages = o.memory / page;
  require(pages != 0, "simulate: a page of ", formats.label(), " has ", page,
          " bytes, the pool would have ", o.memory);
  return pages;
}

}  // namespace

double SimulateResult::hit_rate() const {
  return prompt_tokens == 0 ? 0
                            : static_cast<double>(hit_tokens) / static_cast<double>(prompt_tokens);
}

double SimulateResult::tokens_per_second() const {
  const uint64_t computed = prompt_tokens - hit_tokens + answer_tokens;
  return busy_seconds > 0 ? static_cast<double>(computed) / busy_seconds : 0;
}

void check(const SimulateOptions& o) {
  const auto within = [](const char* flag, uint64_t value, uint64_t most) {
    require(value != 0 && value <= most, "simulate: ", flag, " must be from 1 to ", most, ", got ",
            value);
  };
  within("--heads", o.heads, 1 << 14);
  within("--kv-heads", o.kv_heads, 1 << 14);
  within("--head-dim", o.head_dim, 1024);
  within("--layers", o.layers, 1024);
  within("--users", o.users, 4096);
  within("--step", o.step_tokens, 1 << 16);
  within("--page", o.page_tokens, 1024);
  require(o.heads % o.kv_heads == 0, "simulate: --heads must be a multiple of --kv-heads, got ",
          o.heads, " and ", o.kv_heads);
  require(o.users <= o.step_tokens, "simulate: --users must be at most --step, a token each; got ",
          o.users, " and ", o.step_tokens);
  check_formats("simulate", o.formats, o.head_dim);
  for (const FormatPair& formats : o.formats) pages_of(o, formats);
}

std::vector<SimulateResult> simulate(
    const SimulateOptions& options, const Trace& trace,
    const std::function<void(const std::string&, double)>& progress) {
  check(options);
  const Device device =
      options.device == "cpu" ? open_cpu(options.threads) : Device::open(options.device);
  std::vector<SimulateResult> results;
  for (const FormatPair& formats : options.formats) {
    Server server(device, options, formats, pages_of(options, formats));
    results.push_back(server.run(trace, progress));
  }
  return results;
}

}  // namespace gyre::bench
