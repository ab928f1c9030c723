// Decoding in the steady state allocates nothing: every call of operator new is counted.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <new>

#include "gyre/gyre.h"

namespace {
std::atomic<uint64_t> allocations{0};
}

void* operator new(size_t bytes) {
  ++allocations;
  void* const memory = std::malloc(bytes != 0 ? bytes : 1);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
void* operator new(size_t bytes, std::align_val_t align) {
  ++allocations;
  const auto unit = std::max(static_cast<size_t>(align), sizeof(void*));
  void* const memory = std::aligned_alloc(unit, (bytes + unit - 1) / unit * unit);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::align_val_t /*align*/) noexcept { std::free(memory); }
void operator delete(void* memory, size_t /*bytes*/, std::align_val_t /*align*/) noexcept {
  std::free(memory);
}
void operator delete(void* memory, size_t /*bytes*/) noexcept { std::free(memory); }

namespace gyre::test {
namespace {

TEST(KvCacheSteady, EveryAllocationIsCounted) {
  const auto counted = [](const auto& call) {
    const uint64_t before = allocations;
    call();
    return allocations - before;
  };
  EXPECT_EQ(counted([] { ::operator delete(::operator new(8)); }), 1u);
  EXPECT_EQ(counted([] { ::operator delete[](::operator new[](8)); }), 1u);
  EXPECT_EQ(counted([] {
              const std::align_val_t align{64};
              ::operator delete(::operator new(64, align), align);
            }),
            1u);
}

TEST(KvCacheSteady, AStepAllocatesNothing) {
  constexpr uint64_t kLayers = 8, kHeads = 8, kKvHeads = 2, kDim = 64, kThreads = 2;
  const Device device = Device::open("cpu", {.threads = kThreads});
  const std::vector<KvLayer> layers =
      kv_layers(kLayers, {.layer = {.k = KvFormat::tq8, .v = KvFormat::tq4, .tail = 16, .sinks = 4},
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
    cache.extend(steps, 1);
    steps.submit().wait();
    graph.replay().wait();
  };
  for (int i = 0; i < 10; ++i) step();  // threads and lists get their memory
  const uint64_t before = allocations, system = device.memory().system_allocations;
  for (int i = 0; i < 3000; ++i) step();
  // A thread takes memory once, when it first attends: this one has, the other may be late.
  EXPECT_LE(allocations - before, kThreads - 1);
  EXPECT_EQ(device.memory().system_allocations, system);
  EXPECT_EQ(cache.length(), 3010u);
}

}  // namespace
}  // namespace gyre::test
