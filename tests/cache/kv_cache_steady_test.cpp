// Decoding in the steady state allocates nothing: every call of operator new is counted.
#include "gyre_test.h"
#include "stress/failing_memory.h"

namespace gyre::test {
namespace {

TEST(KvCacheSteady, AStepAllocatesNothing) {
  constexpr uint64_t kLayers = 8, kHeads = 8, kKvHeads = 2, kDim = 64, kThreads = 2;
  const Device device = Device::open("cpu", {.threads = kThreads});
  const std::vector<KvLayer> layers = kv_layers(
      kLayers, {.layer = {.k = KvFormat::tq8, .v = KvFormat::tq4, .tail = 16, .sink_tokens = 4},
                .edge_layers = 1,
                .window = 32,
                .full_every = 2});
  KvCache cache(device,
                {.kv_heads = kKvHeads, .head_dim = kDim, .capacity = 4000, .layers = layers});
  const Tensor q = device.tensor(DType::f32, {1, kHeads, kDim}),
               k = device.tensor(DType::f32, {1, kKvHeads, kDim}),
               v = device.tensor(DType::f32, {1, kKvHeads, kDim}),
               out = device.tensor(DType::f32, {1, kHeads, kDim});
  Encoder encoder(device), steps(device);
  for (uint64_t layer = 0; layer < kLayers; ++layer) {
    rope(encoder, {.x = q, .positions = cache.positions(1), .out = q, .k = k, .k_out = k});
    cache.append(encoder, layer, k, v);
    cache.attend(encoder, layer, {.q = q, .out = out});
  }
  const Graph graph = encoder.instantiate();
  const auto step = [&] {
    cache.begin_step(steps, 1);
    steps.submit().wait();
    graph.replay().wait();
  };
  for (int i = 0; i < 10; ++i) step();  // threads and lists get their memory
  failing_memory().count_from_here();
  const uint64_t system = device.memory().system_allocations;
  for (int i = 0; i < 3000; ++i) step();
  EXPECT_EQ(failing_memory().stop(), 0u);
  EXPECT_EQ(device.memory().system_allocations, system);
  EXPECT_EQ(cache.length(), 3010u);
}

}  // namespace
}  // namespace gyre::test
