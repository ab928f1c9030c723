// A step in the steady state allocates nothing: every call of operator new is counted.
#include <chrono>
#include <cstdio>

#include "gyre_test.h"
#include "stress/failing_memory.h"

namespace gyre::test {
namespace {

// 256 sequences decode: new pages are taken, old ones leave the windows.
void decode(const std::vector<KvLayer>& layers) {
  constexpr uint64_t kSequences = 256, kSteps = 300;
  const Device device = Device::open("cpu", {.threads = 1});
  const KvPool pool(device, {.kv_heads = 1,
                             .head_dim = 16,
                             .layers = layers,
                             .pages = kSequences * 32,
                             .page_tokens = 16,
                             .sequences = kSequences,
                             .step_tokens = 16});
  KvBatch batch(pool, {.max_sequences = kSequences,
                       .max_tokens = kSequences,
                       .max_query_length = 1,
                       .max_kv_length = 512});
  std::vector<KvSequence> sequences;
  for (uint64_t i = 0; i < kSequences; ++i) sequences.push_back(pool.sequence());
  std::vector<KvStep> steps;
  for (KvSequence& sequence : sequences) steps.push_back({sequence, 1});
  Encoder encoder(device), begins(device);
  const Tensor k = device.tensor(DType::f32, {kSequences, 1, 16}),
               out = device.tensor(DType::f32, {kSequences, 1, 16});
  batch.record();
  for (uint64_t layer = 0; layer < layers.size(); ++layer) {
    batch.append(encoder, layer, k, k);
    batch.attend(encoder, layer, {.q = k, .out = out});
  }
  batch.end_step();
  const Graph graph = encoder.instantiate();
  std::vector<double> times;
  times.reserve(kSteps);
  const auto step = [&](bool run) {
    const auto start = std::chrono::steady_clock::now();
    batch.begin_step(begins, steps);
    const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - start;
    times.push_back(took.count());
    begins.submit().wait();
    if (run) graph.replay().wait();
    batch.end_step(run ? KvStepEnd::checked : KvStepEnd::captured);
  };
  for (int i = 0; i < 20; ++i) step(i < 3);  // threads and lists get their memory
  times.clear();
  failing_memory().count_from_here();
  const uint64_t system = device.memory().system_allocations;
  for (uint64_t i = 0; i < kSteps; ++i) step(i % 100 == 0);
  EXPECT_EQ(failing_memory().stop(), 0u);
  EXPECT_EQ(device.memory().system_allocations, system);
  EXPECT_EQ(sequences[0].length(), kSteps + 20);
  std::ranges::sort(times);
  std::printf("begin of 256 sequences: median %.1f us, most %.1f us\n", times[times.size() / 2],
              times.back());
}

TEST(ServingSteady, AStepAllocatesNothing) { decode({{.k = KvFormat::tq8, .v = KvFormat::tq4}}); }

TEST(ServingSteady, NorWithWindowsTailsAndSinks) {
  decode({{.k = KvFormat::tq8, .v = KvFormat::tq4, .tail = 16, .sink_tokens = 4},
          {.k = KvFormat::f16, .v = KvFormat::f16, .window = 48}});
}

}  // namespace
}  // namespace gyre::test
