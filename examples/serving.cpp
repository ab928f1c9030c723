// A small server: a system prompt is computed once, every user shares its pages, and all of them
// take their next token in one step.
#include <gyre/gyre.h>

#include <iostream>
#include <random>
#include <vector>

namespace {

constexpr uint64_t kLayers = 2, kHeads = 8, kKvHeads = 2, kDim = 64, kUsers = 8, kPrompt = 1000;

// Stands in for a model: q, k and v of one layer as its projections would give them.
gyre::Tensor projection(const gyre::Device& device, uint64_t tokens, uint64_t heads) {
  static std::mt19937 random(1);
  std::normal_distribution<float> normal;
  gyre::Tensor made = device.tensor(gyre::DType::f32, {tokens, heads, kDim});
  for (float& value : made.data<float>()) value = normal(random);
  return made;
}

void forward(gyre::Encoder& encoder, gyre::KvBatch& batch) {
  const gyre::Device& device = encoder.device();
  for (uint64_t layer = 0; layer < kLayers; ++layer) {
    const uint64_t tokens = batch.tokens();
    const gyre::Tensor q = projection(device, tokens, kHeads),
                       k = projection(device, tokens, kKvHeads),
                       v = projection(device, tokens, kKvHeads),
                       out = device.tensor(gyre::DType::f32, {tokens, kHeads, kDim});
    batch.rope_append(encoder, layer, {.q = q, .q_out = q, .k = k, .v = v});
    batch.attend(encoder, layer, {.q = q, .out = out});
  }
  encoder.submit().wait();
}

void print(const gyre::KvPool& pool, const char* when) {
  const gyre::KvPoolInfo info = pool.describe();
  const gyre::KvGroupInfo& pages = info.groups[0];
  std::cout << when << ": " << info.sequences << " sequences, " << pages.used << " pages, "
            << pages.shared << " of them shared, " << pages.cached << " cached, "
            << info.used_bytes / 1024 << " KiB\n";
}

}  // namespace

int main() {
  const gyre::Device device = gyre::Device::open("cpu");
  const gyre::KvPool pool(device, {.kv_heads = kKvHeads,
                                   .head_dim = kDim,
                                   .layers = std::vector<gyre::KvLayer>(kLayers),
                                   .pages = 128});
  gyre::KvBatch batch(pool, {.max_sequences = kUsers, .max_tokens = 512});
  gyre::Encoder encoder(device);

  std::vector<int32_t> tokens(kPrompt);
  for (size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<int32_t>(i);
  {
    gyre::KvSequence prompt = pool.sequence();
    for (uint64_t done = 0; done < kPrompt; done += 500) {
      batch.begin_step(encoder, {{.sequence = prompt, .tokens = 500, .is_prefill = true}});
      forward(encoder, batch);
    }
    pool.publish(prompt, tokens);
    print(pool, "the prompt");
  }
  print(pool, "nobody there");

  // Each user's prompt begins with the same tokens: whole pages of them are found, the rest is
  // computed.
  std::vector<gyre::KvSequence> users;
  for (uint64_t i = 0; i < kUsers; ++i) users.push_back(pool.match(tokens));
  const uint64_t known = users[0].length();
  std::vector<gyre::KvStep> steps;
  for (gyre::KvSequence& user : users) steps.push_back({user, kPrompt - known, true});
  batch.begin_step(encoder, steps);
  forward(encoder, batch);
  print(pool, "eight users");

  for (gyre::KvStep& step : steps) step.tokens = 1, step.is_prefill = false;
  for (int i = 0; i < 50; ++i) {
    batch.begin_step(encoder, steps);
    forward(encoder, batch);
  }
  print(pool, "50 tokens later");
  std::cout << known << " of " << kPrompt << " tokens of each prompt were found\n";
}
