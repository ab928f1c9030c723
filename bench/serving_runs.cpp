#include "serving_runs.h"

#include <algorithm>

#include "runtime/require.h"

namespace gyre::bench {
namespace {

constexpr FormatPair both(KvFormat format) { return {format, format}; }

std::vector<FormatPair> usual() {
  return {both(KvFormat::f16),
          both(KvFormat::tq8),
          {KvFormat::tq8, KvFormat::tq4},
          both(KvFormat::tq4)};
}

// `count` lengths, the given ones over and over.
std::vector<uint64_t> repeated(const std::vector<uint64_t>& lengths, uint64_t count) {
  std::vector<uint64_t> all(count);
  for (uint64_t i = 0; i < count; ++i) all[i] = lengths[i % lengths.size()];
  return all;
}

ServingShape shape_of(uint64_t heads, uint64_t kv_heads, uint64_t head_dim,
                      std::vector<uint64_t> lengths, uint64_t page_tokens = 64) {
  ServingShape s;
  s.heads = heads;
  s.kv_heads = kv_heads;
  s.head_dim = head_dim;
  s.page_tokens = page_tokens;
  s.lengths = std::move(lengths);
  return s;
}

const std::vector<uint64_t> kRagged = {512, 1024, 2048, 4096, 8192, 16384};

std::vector<uint64_t> one_long() {
  std::vector<uint64_t> lengths(64, 512);
  lengths[0] = 131072;
  return lengths;
}

std::vector<ServingRun> gpu_runs() {
  std::vector<ServingRun> runs;
  const auto batch = [](uint64_t count, uint64_t length) { return repeated({length}, count); };
  for (const auto& lengths :
       {batch(16, 4096), batch(64, 4096), batch(128, 1024), repeated(kRagged, 16)})
    runs.push_back({shape_of(32, 8, 128, lengths), usual()});
  for (const auto& lengths : {batch(64, 4096), repeated(kRagged, 16)})
    runs.push_back({shape_of(16, 8, 256, lengths), usual()});
  for (const uint64_t length : {4096, 32768, 131072})
    runs.push_back({shape_of(32, 8, 128, {length}), usual(), ServingAgainst::linear});
  for (const auto& lengths : {batch(16, 4096), batch(64, 4096)})
    runs.push_back({shape_of(32, 8, 128, lengths, 16), usual(), ServingAgainst::pages_of_64});
  runs.push_back({shape_of(32, 8, 128, one_long()), usual(), ServingAgainst::equal_lengths});
  ServingShape shared = shape_of(32, 8, 128, batch(64, 4096));
  shared.shared = 2048;
  runs.push_back({shared, usual()});
  return runs;
}

std::vector<ServingRun> cpu_runs() {
  ServingShape shared = shape_of(32, 8, 128, repeated({4096}, 8));
  shared.shared = 2048;
  return {{shape_of(32, 8, 128, repeated(kRagged, 16)), usual(), ServingAgainst::one_by_one},
          {shape_of(32, 8, 128, repeated(kRagged, 16)), usual()},
          {shape_of(32, 8, 128, {16384}), usual(), ServingAgainst::linear},
          {shape_of(32, 8, 128, {16384}, 16), usual(), ServingAgainst::pages_of_64},
          {shared, usual()}};
}

void check(const ServingRun& run) {
  const ServingShape& s = run.shape;
  check_heads(s.linear(1));
  check_range("--batch", s.lengths.size(), 1 << 16);
  check_range("--page", s.page_tokens, 1024);
  for (const uint64_t length : s.lengths) check_range("--context", length, kMaxLength);
  require(s.page_tokens % 8 == 0, "bench: --page must be a multiple of 8, got ", s.page_tokens);
  const uint64_t shortest = *std::min_element(s.lengths.begin(), s.lengths.end());
  require(s.shared <= shortest, "bench: --shared must be at most the shortest context ", shortest,
          ", got ", s.shared);
  check_range("--tokens", s.tokens, 1 << 16);
  require(s.tokens <= shortest, "bench: --tokens must be at most the shortest context ", shortest,
          ", got ", s.tokens);
  require(s.shared % s.page_tokens == 0, "bench: --shared must be whole pages of ", s.page_tokens,
          " tokens, got ", s.shared);
  check_formats("bench", run.formats, s.head_dim, s.linear(1).v_dim());
}

}  // namespace

std::string ServingChoice::first_flag() const {
  if (batch) return "--batch";
  if (page_tokens) return "--page";
  return shared ? "--shared" : "";
}

uint64_t ServingShape::pages() const {
  uint64_t sum = shared / page_tokens;
  for (const uint64_t length : lengths) sum += (length - shared + page_tokens - 1) / page_tokens;
  return sum;
}

uint64_t ServingShape::longest() const { return *std::max_element(lengths.begin(), lengths.end()); }

std::string ServingShape::text() const {
  const auto [shortest, longest] = std::minmax_element(lengths.begin(), lengths.end());
  const std::string count = std::to_string(lengths.size());
  if (*shortest == *longest) return count + " x " + std::to_string(*shortest);
  return count + " ragged, " + std::to_string(*shortest) + " to " + std::to_string(*longest);
}

std::vector<ServingRun> serving_runs(const AttentionChoice& attention, const ServingChoice& choice,
                                     bool gpu) {
  std::vector<ServingRun> runs;
  AttentionChoice shape = attention;
  shape.tokens.reset();
  if (choice.any() || shape.any_shape()) {
    ServingShape s;
    s.heads = attention.heads.value_or(s.heads);
    s.kv_heads = attention.kv_heads.value_or(attention.latent ? 1 : s.kv_heads);
    s.head_dim = attention.head_dim.value_or(attention.latent ? kLatentDim : s.head_dim);
    s.rotary_dim = attention.latent ? kRotaryDim : 0;
    require(s.rotary_dim == 0 || s.kv_heads == 1,
            "bench: --latent has one KV head, got --kv-heads ", s.kv_heads);
    s.page_tokens = choice.page_tokens.value_or(s.page_tokens);
    s.shared = choice.shared.value_or(0);
    const uint64_t batch = choice.batch.value_or(16);
    require(batch != 0 && batch <= 1 << 16, "bench: --batch must be from 1 to 65536, got ", batch);
    s.lengths = repeated(attention.contexts.empty() ? kRagged : attention.contexts, batch);
    runs.push_back({s, attention.latent ? latent_formats() : usual()});
  } else {
    runs = gpu ? gpu_runs() : cpu_runs();
  }
  for (ServingRun& run : runs) {
    if (!attention.formats.empty()) run.formats = attention.formats;
    run.shape.tokens = attention.tokens.value_or(1);
    check(run);
  }
  return runs;
}

}  // namespace gyre::bench
