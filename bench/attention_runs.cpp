#include "attention_runs.h"

#include <algorithm>

#include "runtime/require.h"

namespace gyre::bench {
namespace {

constexpr FormatPair both(KvFormat format) { return {format, format}; }

constexpr FormatPair kF16 = both(KvFormat::f16), kTq8 = both(KvFormat::tq8),
                     kTq4 = both(KvFormat::tq4), kTq3 = both(KvFormat::tq3),
                     kTq8Tq4 = {KvFormat::tq8, KvFormat::tq4};

std::vector<FormatPair> usual() { return {kF16, kTq8, kTq4, kTq3, kTq8Tq4}; }

// The GPU computes errors on the host: up to as many products as its first standard shape has.
bool small_enough(const AttentionShape& s) {
  return s.tokens == 1 && s.heads * s.head_dim * s.context <= uint64_t{32} * 128 * 4096;
}

// Contexts that were not given are long enough for the queries.
std::vector<uint64_t> contexts_of(const AttentionChoice& choice) {
  if (!choice.contexts.empty()) return choice.contexts;
  const uint64_t tokens = choice.tokens.value_or(1);
  if (choice.latent) return {std::max<uint64_t>(8192, tokens)};
  std::vector<uint64_t> contexts = {std::max<uint64_t>(1024, tokens),
                                    std::max<uint64_t>(16384, tokens)};
  contexts.erase(std::unique(contexts.begin(), contexts.end()), contexts.end());
  return contexts;
}

// A latent is shared by all heads of a model on a device: from 16 to 128.
std::vector<AttentionRun> latent_runs(const AttentionChoice& choice) {
  require(choice.kv_heads.value_or(1) == 1, "bench: --latent has one KV head, got --kv-heads ",
          choice.kv_heads.value_or(1));
  std::vector<AttentionRun> runs;
  std::vector<uint64_t> heads = {16, 32, 64, 128};
  if (choice.heads) heads = {*choice.heads};
  for (const uint64_t context : contexts_of(choice)) {
    for (const uint64_t count : heads) {
      AttentionShape s;
      s.heads = count;
      s.kv_heads = 1;
      s.head_dim = choice.head_dim.value_or(kLatentDim);
      s.rotary_dim = kRotaryDim;
      s.tokens = choice.tokens.value_or(s.tokens);
      s.context = context;
      runs.push_back({s, latent_formats(), small_enough(s)});
    }
  }
  return runs;
}

std::vector<AttentionRun> chosen(const AttentionChoice& choice) {
  if (choice.latent) return latent_runs(choice);
  std::vector<AttentionRun> runs;
  for (const uint64_t context : contexts_of(choice)) {
    AttentionShape s;
    s.heads = choice.heads.value_or(s.heads);
    s.kv_heads = choice.kv_heads.value_or(s.kv_heads);
    s.head_dim = choice.head_dim.value_or(s.head_dim);
    s.tokens = choice.tokens.value_or(s.tokens);
    s.context = context;
    runs.push_back({s, usual(), small_enough(s)});
  }
  return runs;
}

void check(const AttentionRun& run) {
  const AttentionShape& s = run.shape;
  check_heads(s);
  check_range("--context", s.context, kMaxLength);
  check_range("--tokens", s.tokens, kMaxLength);
  // Queries before the first key would see nothing, and no model has them.
  require(s.tokens <= s.context, "bench: --tokens must be at most --context, for the queries are ",
          "the newest tokens of the context; got ", s.tokens, " and ", s.context);
  check_formats("bench", run.formats, s.head_dim, s.v_dim());
}

std::vector<AttentionRun> checked(const AttentionChoice& choice, std::vector<AttentionRun> runs) {
  for (AttentionRun& run : runs) {
    if (!choice.formats.empty()) run.formats = choice.formats;
    check(run);
  }
  return runs;
}

}  // namespace

std::vector<FormatPair> latent_formats() {
  return {both(KvFormat::bf16),
          kTq8,
          {KvFormat::tq6, KvFormat::tq8},
          {KvFormat::tq4, KvFormat::tq8},
          {KvFormat::tq3, KvFormat::tq8}};
}

bool AttentionChoice::any_shape() const {
  return latent || heads || kv_heads || head_dim || tokens || !contexts.empty();
}

std::string AttentionChoice::first_flag() const {
  if (latent) return "--latent";
  if (heads) return "--heads";
  if (kv_heads) return "--kv-heads";
  if (head_dim) return "--head-dim";
  if (tokens) return "--tokens";
  if (!contexts.empty()) return "--context";
  return formats.empty() ? "" : "--formats";
}

std::vector<AttentionRun> cpu_attention_runs(const AttentionChoice& choice) {
  if (choice.any_shape()) return checked(choice, chosen(choice));
  return checked(choice, {{{8, 8, 128, 16384, 1}, usual()},
                          {{32, 8, 128, 16384, 1}, usual()},
                          {{16, 8, 256, 16384, 1}, usual()},
                          {{32, 8, 128, 1024, 1}, usual()},
                          {{32, 8, 128, 4096, 512}, usual()}});
}

std::vector<AttentionRun> gpu_attention_runs(const AttentionChoice& choice) {
  if (choice.any_shape()) return checked(choice, chosen(choice));
  const std::vector<FormatPair> every = {
      kF16, both(KvFormat::bf16), kTq8, kTq8Tq4, both(KvFormat::tq6), both(KvFormat::tq5), kTq4,
      kTq3, both(KvFormat::tq2)};
  const std::vector<FormatPair> few = {kF16, kTq8, kTq4};
  std::vector<AttentionRun> runs;
  for (const uint64_t context : {4096, 32768, 131072})
    runs.push_back({{32, 8, 128, context}, every, context == 4096});
  for (const uint64_t context : {4096, 32768, 131072})
    runs.push_back({{16, 8, 256, context}, few, false});
  // 32 sequences of one length: to the kernel, 32 times as many heads.
  runs.push_back({{1024, 256, 128, 4096}, few, false});
  // Other shapes with the same bytes: GQA ratios, head dims, a context that fits nothing.
  for (const uint64_t ratio : {1, 2, 6, 7, 8, 12, 16})
    runs.push_back({{8 * ratio, 8, 128, 32768}, few, false});
  runs.push_back({{32, 8, 64, 65536}, few, false});
  runs.push_back({{32, 8, 512, 8192}, few, false});
  runs.push_back({{32, 8, 128, 32749}, few, false});
  return checked(choice, std::move(runs));
}

void check_range(const char* flag, uint64_t value, uint64_t limit) {
  require(value != 0 && value <= limit, "bench: ", flag, " must be from 1 to ", limit, ", got ",
          value);
}

void check_heads(const AttentionShape& s) {
  constexpr uint64_t kMaxHeads = 1 << 14;
  check_range("--heads", s.heads, kMaxHeads);
  check_range("--kv-heads", s.kv_heads, kMaxHeads);
  check_range("--head-dim", s.head_dim, 1024);
  require(s.heads % s.kv_heads == 0, "bench: --heads must be a multiple of --kv-heads, got ",
          s.heads, " and ", s.kv_heads);
}

double attention_flops(const AttentionShape& s) {
  const auto t = static_cast<double>(s.tokens), l = static_cast<double>(s.context);
  const double pairs_seen = t * (l - t) + t * (t + 1) / 2;
  return 2 * pairs_seen * static_cast<double>(s.heads * (s.q_dim() + s.head_dim));
}

}  // namespace gyre::bench
