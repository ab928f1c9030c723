#include "stress/life_talks.h"

#include <bit>
#include <utility>

namespace gyre::test {
namespace {

constexpr uint64_t kHeads = 2, kKvHeads = 1, kDim = 32, kStep = 16;

enum Kind : uint64_t { keys, values, queries };

Tensor rows(const Device& device, std::span<const int32_t> tokens, uint64_t layer, Kind kind) {
  const uint64_t heads = kind == queries ? kHeads : kKvHeads;
  const Tensor made = device.tensor(DType::f32, {tokens.size(), heads, kDim});
  const std::span<float> to = made.data<float>();
  for (size_t i = 0; i < to.size(); ++i) {
    uint64_t hash =
        static_cast<uint32_t>(tokens[i / (heads * kDim)]) * uint64_t{0x9E3779B97F4A7C15};
    hash ^= (layer * 3 + kind) * 0xC2B2AE3D27D4EB4Fu + i % (heads * kDim) * 0x165667B19E3779F9u;
    hash = (hash ^ hash >> 29) * 0xBF58476D1CE4E5B9u;
    to[i] = static_cast<float>(static_cast<int32_t>(hash >> 32)) * 0x1p-31f;
  }
  return made;
}

void add_bits(const Tensor& out, LifeBits& bits) {
  for (const float value : out.data<const float>()) bits.push_back(std::bit_cast<uint32_t>(value));
}

std::vector<KvLayer> layers() {
  return {{.k = KvFormat::tq8, .v = KvFormat::tq4},
          {.k = KvFormat::f16, .v = KvFormat::f16, .window = 20},
          {.k = KvFormat::tq4, .v = KvFormat::tq6}};
}

// True: what was done. A window refuses what it no longer has.
template <class Call>
bool unless_window(const Call& call) {
  try {
    call();
  } catch (const Error& error) {
    demand(error.code() == ErrorCode::invalid_argument, error.what());
    return false;
  }
  return true;
}

}  // namespace

CacheTalk::CacheTalk(const Device& device)
    : encoder_(device),
      cache_(device, {.kv_heads = kKvHeads,
                      .head_dim = kDim,
                      .capacity = kLifeMaxTokens + kStep,
                      .layers = layers(),
                      .step_tokens = kStep}) {}

void CacheTalk::append(std::span<const int32_t> tokens) {
  while (!tokens.empty()) {
    const auto step = tokens.first(std::min<size_t>(tokens.size(), kStep));
    cache_.begin_step(encoder_, step.size());
    for (uint64_t layer = 0; layer < layers().size(); ++layer)
      cache_.append(encoder_, layer, rows(encoder_.device(), step, layer, keys),
                    rows(encoder_.device(), step, layer, values));
    encoder_.submit().wait();
    tokens_.insert(tokens_.end(), step.begin(), step.end());
    tokens = tokens.subspan(step.size());
  }
  demand(cache_.length() == tokens_.size(), "a cache has another length than its tokens");
}

void CacheTalk::rollback(uint64_t count) {
  if (!unless_window([&] { cache_.rollback(encoder_, count); })) return;
  encoder_.submit().wait();
  tokens_.resize(tokens_.size() - count);
}

void CacheTalk::fork() {
  KvCache copy = cache_.fork(encoder_);
  encoder_.submit().wait();
  cache_ = std::move(copy);
}

void CacheTalk::clear() {
  cache_.clear(encoder_);
  encoder_.submit().wait();
  tokens_.clear();
}

void CacheTalk::load(const std::string& path, LifeTokens tokens) {
  cache_.load(path);
  tokens_ = std::move(tokens);
}

LifeBits CacheTalk::answer(int32_t token) {
  const Device& device = encoder_.device();
  const std::span<const int32_t> step(&token, 1);
  std::vector<Tensor> outs;
  cache_.begin_step(encoder_, 1);
  for (uint64_t layer = 0; layer < layers().size(); ++layer) {
    cache_.append(encoder_, layer, rows(device, step, layer, keys),
                  rows(device, step, layer, values));
    outs.push_back(device.tensor(DType::f32, {1, kHeads, kDim}));
    cache_.attend(encoder_, layer, {.q = rows(device, step, layer, queries), .out = outs.back()});
  }
  cache_.rollback(encoder_, 1);
  encoder_.submit().wait();
  LifeBits bits = {static_cast<uint32_t>(cache_.length())};
  for (const Tensor& out : outs) add_bits(out, bits);
  return bits;
}

LifePool::LifePool(const Device& device)
    : pool(device, {.kv_heads = kKvHeads,
                    .head_dim = kDim,
                    .layers = layers(),
                    .pages = 120,
                    .page_tokens = 8,
                    .sequences = 12,
                    .step_tokens = kStep}),
      batch(pool, {.max_sequences = 2, .max_tokens = kStep}),
      encoder(device) {}

void SequenceTalk::append(std::span<const int32_t> tokens) {
  const Device& device = pool_->encoder.device();
  while (!tokens.empty()) {
    const auto step = tokens.first(std::min<size_t>(tokens.size(), kStep));
    pool_->batch.begin_step(pool_->encoder, {{sequence_, step.size(), true}});
    for (uint64_t layer = 0; layer < layers().size(); ++layer)
      pool_->batch.append(pool_->encoder, layer, rows(device, step, layer, keys),
                          rows(device, step, layer, values));
    pool_->encoder.submit().wait();
    tokens_.insert(tokens_.end(), step.begin(), step.end());
    tokens = tokens.subspan(step.size());
  }
  demand(sequence_.length() == tokens_.size(), "a sequence has another length than its tokens");
}

void SequenceTalk::rollback(uint64_t count) {
  if (unless_window([&] { sequence_.rollback(count); })) tokens_.resize(tokens_.size() - count);
}

void SequenceTalk::clear() {
  sequence_.clear();
  tokens_.clear();
}

void SequenceTalk::load(const std::string& path, LifeTokens tokens) {
  sequence_ = pool_->pool.load(path);
  tokens_ = std::move(tokens);
}

void SequenceTalk::match(std::span<const int32_t> tokens) {
  sequence_ = pool_->pool.match(tokens);
  const uint64_t length = sequence_.length();
  demand(length <= tokens.size(), "a prefix is longer than what was asked for");
  tokens_.assign(tokens.begin(), tokens.begin() + static_cast<ptrdiff_t>(length));
}

void SequenceTalk::travel() {
  KvSequence made = pool_->pool.sequence();
  const uint64_t page_tokens = pool_->pool.options().page_tokens;
  for (uint64_t page = 0; page * page_tokens < tokens_.size(); ++page)
    pool_->pool.import_page(made, pool_->pool.export_page(sequence_, page));
  sequence_ = std::move(made);
  demand(sequence_.length() == tokens_.size(), "a sequence that travelled has another length");
}

LifeBits SequenceTalk::answer(int32_t token) {
  const Device& device = pool_->encoder.device();
  const std::span<const int32_t> step(&token, 1);
  KvSequence copy = sequence_.fork();
  std::vector<Tensor> outs;
  pool_->batch.begin_step(pool_->encoder, {{copy, 1}});
  for (uint64_t layer = 0; layer < layers().size(); ++layer) {
    pool_->batch.append(pool_->encoder, layer, rows(device, step, layer, keys),
                        rows(device, step, layer, values));
    outs.push_back(device.tensor(DType::f32, {1, kHeads, kDim}));
    pool_->batch.attend(pool_->encoder, layer,
                        {.q = rows(device, step, layer, queries), .out = outs.back()});
  }
  pool_->encoder.submit().wait();
  LifeBits bits = {static_cast<uint32_t>(sequence_.length())};
  for (const Tensor& out : outs) add_bits(out, bits);
  return bits;
}

}  // namespace gyre::test
