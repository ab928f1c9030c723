// DeviceOptions::poll ends a list, and what it ran on stays usable.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <stdexcept>
#include <thread>

#include "cpu/device.h"
#include "cpu/kernels.h"
#include "expect_error.h"
#include "folder.h"
#include "gyre_test.h"
#include "numbers.h"
#include "ops/cache_ops.h"

namespace gyre::test {
namespace {

using Clock = std::chrono::steady_clock;

struct Stop : std::runtime_error {
  Stop() : std::runtime_error("stop") {}
};

struct Polled {
  bool on = false;
  int calls = 0;
  int until = 1;           // throws at this call
  bool no_memory = false;  // what it throws
  DeviceOptions options(uint32_t threads) {
    return {.threads = threads, .poll = [this] {
              if (!on || ++calls < until) return;
              if (no_memory) throw std::bad_alloc();
              throw Stop();
            }};
  }
};

constexpr uint64_t kHeads = 8, kKvHeads = 2, kDim = 64, kLength = 4096, kPages = 4096, kPage = 1024;

// Attention over a long prompt: seconds of work in tasks of milliseconds.
class Interrupt : public testing::TestWithParam<uint32_t> {
 protected:
  Tensor filled(uint64_t tokens, uint64_t heads, float seed) const {
    const Tensor made = device.tensor(DType::f32, {tokens, heads, kDim});
    float value = seed;
    for (float& x : made.data<float>())
      x = (value = value * 1.7f - static_cast<int>(value * 1.7f)) - 0.5f;
    return made;
  }
  Tensor integers(const std::vector<int32_t>& values, const Dims& shape) const {
    return tensor_of(device, values, shape);
  }
  // A sequence may have it as often as it likes.
  KvPages one_page(KvFormat format) const {
    return KvPages::allocate(
        device, {.k = format, .v = format, .kv_heads = 1, .head_dim = kDim, .page_tokens = kPage},
        1);
  }
  void prefill(const Tensor& k) {
    cache.begin_step(encoder, k.shape(0));
    cache.append(encoder, 0, k, k);
    encoder.submit();
  }
  std::vector<float> decode() {
    const Tensor q = filled(1, kHeads, 0.3f), out = filled(1, kHeads, 0.1f);
    cache.attend(encoder, 0, {.q = q, .out = out});
    encoder.submit();
    return floats_of(out);
  }

  Polled polled;
  Device device = Device::open("cpu", polled.options(GetParam()));
  Encoder encoder{device};
  KvCache cache{
      device,
      {.kv_heads = kKvHeads, .head_dim = kDim, .capacity = 2 * kLength, .step_tokens = kLength}};
};

TEST_P(Interrupt, EndsAListAndLeavesTheCacheUsable) {
  const Tensor q = filled(kLength, kHeads, 0.7f);
  prefill(filled(kLength, kKvHeads, 0.2f));
  const std::vector<float> before = decode();
  const Tensor out = filled(kLength, kHeads, 0.1f);
  for (int i = 0; i < 40; ++i) cache.attend(encoder, 0, {.q = q, .out = out});
  const uint32_t recorded = encoder.size();
  polled.on = true;
  const auto begin = Clock::now();
  EXPECT_THROW(encoder.submit(), Stop);
  const std::chrono::duration<double> took = Clock::now() - begin;
  EXPECT_LT(took.count(), 0.25) << "20 ms until it is asked, and the tasks under way";
  EXPECT_EQ(encoder.size(), recorded) << "the list stays";
  encoder.clear();
  polled.on = false;
  EXPECT_EQ(decode(), before);
  prefill(filled(1, kKvHeads, 0.4f));
  EXPECT_NE(decode(), before);
}

// Decoding counts pieces of keys in memory: a call that ends in between must not confuse the next.
TEST_P(Interrupt, CountersOfADecodeAreMadeGood) {
  prefill(filled(kLength, kKvHeads, 0.2f));
  const std::vector<float> before = decode();
  // Another question: states that it leaves are wrong for the one that is compared.
  const Tensor q = filled(1, kHeads, 0.9f), out = filled(1, kHeads, 0.1f);
  constexpr int kTimes = 11;
  int interrupted = 0;
  for (int until = 1; until <= kTimes; ++until) {
    for (int i = 0; i < 400; ++i) cache.attend(encoder, 0, {.q = q, .out = out});
    polled.on = true;
    polled.calls = 0;
    polled.until = 1 + until % 3;
    try {
      encoder.submit();
    } catch (const Stop&) {
      ++interrupted;
      encoder.clear();
    }
    polled.on = false;
    ASSERT_EQ(decode(), before) << until;
  }
  EXPECT_GE(interrupted, kTimes / 3) << "a list takes too short a time to be interrupted";
}

TEST_P(Interrupt, AListMayBeSubmittedAgain) {
  const Tensor k = filled(kLength, kKvHeads, 0.2f), q = filled(kLength, kHeads, 0.7f);
  const Tensor out = filled(kLength, kHeads, 0.1f);
  const auto record = [&] {
    cache.begin_step(encoder, kLength);
    cache.append(encoder, 0, k, k);
    for (int i = 0; i < 8; ++i) cache.attend(encoder, 0, {.q = q, .out = out});
  };
  record();
  encoder.submit();
  const std::vector<float> prompt = floats_of(out), token = decode();
  cache.clear(encoder);
  encoder.submit();
  for (float& x : out.data<float>()) x = -1;
  record();
  polled.on = true;
  EXPECT_THROW(encoder.submit(), Stop);
  polled.on = false;
  encoder.submit();
  EXPECT_EQ(encoder.size(), 0u);
  EXPECT_EQ(cache.length(), kLength);
  EXPECT_EQ(floats_of(out), prompt);
  EXPECT_EQ(decode(), token);
}

// A task of seconds does not run to its end, and writes no row.
TEST_P(Interrupt, EndsALongTask) {
  constexpr uint64_t kRows = 64;
  for (const KvFormat format : {KvFormat::f32, KvFormat::tq8}) {
    const Tensor out = filled(kRows, 1, 0.1f);
    for (float& x : out.data<float>()) x = -1;
    attention(encoder,
              {.q = filled(kRows, 1, 0.3f),
               .pages = one_page(format),
               .page_table = integers(std::vector<int32_t>(kPages), {1, kPages}),
               .kv_lengths = integers({kPages * kPage}, {1}),
               .cu_seqlens_q = integers({0, kRows}, {2}),
               .out = out},
              {.max_query_length = kRows});
    polled.on = true;
    EXPECT_THROW(encoder.submit(), Stop) << name(format);
    polled.on = false;
    encoder.clear();
    for (const float x : out.data<const float>()) ASSERT_EQ(x, -1) << name(format);
  }
}

// Sequences that come after it in the same task: their pages are none, so each would be NaN at
// once.
TEST_P(Interrupt, EndsTheRestOfALongTask) {
  constexpr uint64_t kSequences = 192;
  std::vector<int32_t> table(kSequences * kPages), begin(kSequences + 1);
  for (size_t i = 0; i < table.size(); ++i) table[i] = i / kPages % 3 == 0 ? 0 : -1;
  for (size_t i = 0; i <= kSequences; ++i) begin[i] = static_cast<int32_t>(i);
  const Tensor out = filled(kSequences, 1, 0.1f);
  for (float& x : out.data<float>()) x = -1;
  attention(encoder,
            {.q = filled(kSequences, 1, 0.3f),
             .pages = one_page(KvFormat::f32),
             .page_table = integers(table, {kSequences, kPages}),
             .kv_lengths = integers(std::vector<int32_t>(kSequences, kPages * kPage), {kSequences}),
             .cu_seqlens_q = integers(begin, {kSequences + 1}),
             .out = out},
            {});
  polled.on = true;
  EXPECT_THROW(encoder.submit(), Stop);
  encoder.clear();
  for (const float x : out.data<const float>()) ASSERT_EQ(x, -1);
}

// The child has none of the threads that the list waits for.
TEST_P(Interrupt, PollMayFork) {
#if defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "thread sanitizer does not follow fork() of a process with threads";
#endif
  for (const bool throws : {false, true}) {
    pid_t child = -1;
    const Device forking = Device::open("cpu", {.threads = GetParam(), .poll = [&] {
                                                  if (child != -1) return;
                                                  child = fork();
                                                  if (child == 0) alarm(120);  // instead of a hang
                                                  if (child == 0 && throws) throw Stop();
                                                }});
    const Tensor from = forking.tensor(DType::f32, {4096, 8, 128}),
                 to = forking.tensor(DType::f32, {4096, 8, 128});
    Encoder list(forking);
    while (child == -1) {
      for (int i = 0; i < 200; ++i) kv_copy(list, {.k = from, .k_cache = to});
      bool lost = false;
      try {
        list.submit().wait();
      } catch (const Error& error) {
        lost = error.code() == ErrorCode::device_lost;
      } catch (const Stop&) {
        lost = throws;
      }
      if (child == 0) _exit(lost ? 0 : 1);
      ASSERT_FALSE(lost) << "in the parent it goes on";
    }
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFEXITED(status)) << "it hung";
    EXPECT_EQ(WEXITSTATUS(status), 0) << throws;
  }
}

// Neither on the device whose list runs nor on another: it would wait for a list that waits for it.
TEST_P(Interrupt, PollDoesNotSubmit) {
  const Device other = Device::open("cpu", {.threads = 1});
  int polls = 0, refusals = 0;
  const Device* nested = nullptr;
  const Graph* graph = nullptr;
  const auto submit_inside = [&] {
    if (nested == nullptr) return;
    ++polls;
    Encoder inside(*nested);
    const Tensor from = nested->tensor(DType::f32, {4, 1, 16}),
                 to = nested->tensor(DType::f32, {4, 1, 16});
    kv_copy(inside, {.k = from, .k_cache = to});
    refusals += throws_error(ErrorCode::invalid_argument, {"encoder.submit", "poll"},
                             [&] { inside.submit(); });
    refusals += throws_error(ErrorCode::invalid_argument, {"encoder.instantiate", "poll"},
                             [&] { inside.instantiate(); });
    inside.clear();
    refusals += throws_error(ErrorCode::invalid_argument, {"graph.replay", "poll"},
                             [&] { graph->replay(); });
  };
  const Device polling = Device::open("cpu", {.threads = GetParam(), .poll = submit_inside});
  const Tensor from = polling.tensor(DType::f32, {4096, 8, 128}),
               to = polling.tensor(DType::f32, {4096, 8, 128});
  Encoder outside(polling);
  for (const Device* device_of_poll : {&polling, &other}) {
    Encoder recorded(*device_of_poll);
    kv_copy(recorded, {.k = device_of_poll->tensor(DType::f32, {4, 1, 16}),
                       .k_cache = device_of_poll->tensor(DType::f32, {4, 1, 16})});
    const Graph made = recorded.instantiate();
    graph = &made;
    nested = device_of_poll;
    polls = refusals = 0;
    while (polls == 0) {
      for (int i = 0; i < 200; ++i) kv_copy(outside, {.k = from, .k_cache = to});
      outside.submit().wait();
    }
    nested = nullptr;
    EXPECT_EQ(refusals, 3 * polls);
  }
}

INSTANTIATE_TEST_SUITE_P(Threads, Interrupt, testing::Values(1u, 2u),
                         [](const auto& at) { return std::to_string(at.param); });

// A copy takes longer than it is until somebody asks.
void copy_slowly(const void* params, const uint64_t* args, uint32_t task, uint32_t tasks) noexcept {
  std::this_thread::sleep_for(std::chrono::milliseconds(30));
  cpu::select_bytes_copy(0)(params, args, task, tasks);
}
// The library's kernels with another one for `info`.
std::vector<cpu::CpuKernel> table_with(const KernelInfo& info, cpu::TaskFn (*select)(uint64_t)) {
  const auto rows = cpu::kernel_table();
  std::vector<cpu::CpuKernel> table(rows.begin(), rows.end());
  for (cpu::CpuKernel& row : table)
    if (row.info == &info) row.select = select;
  return table;
}

// The caller has no work left, and is asked all the same.
std::thread::id caller;
std::atomic<bool> gave_up = false;
std::atomic<bool> worker_has_task = false;
void wait_unless_caller(const void* /*params*/, const uint64_t* /*args*/, uint32_t /*task*/,
                        uint32_t /*tasks*/) noexcept {
  const auto until = Clock::now() + std::chrono::seconds(60);
  if (std::this_thread::get_id() == caller) {
    // On a busy machine the worker comes late: it must find a task.
    while (!worker_has_task && Clock::now() < until) std::this_thread::yield();
    return;
  }
  worker_has_task = true;
  while (!cpu::task_ended() && Clock::now() < until) std::this_thread::yield();
  if (!cpu::task_ended()) gave_up = true;
}
TEST(InterruptWaiting, EndsTasksOfOthers) {
  const std::vector<cpu::CpuKernel> table =
      table_with(kKvCopy.info, [](uint64_t) -> cpu::TaskFn { return wait_unless_caller; });
  caller = std::this_thread::get_id();
  Polled polled{.on = true};
  const Device device = device_of(cpu::make_device(polled.options(2), table));
  const Tensor from = device.tensor(DType::f32, {4096, 8, 128}),
               to = device.tensor(DType::f32, {4096, 8, 128});
  Encoder encoder(device);
  kv_copy(encoder, {.k = from, .k_cache = to});
  kv_copy(encoder, {.k = to, .k_cache = from});  // waits for the first
  EXPECT_THROW(encoder.submit(), Stop);
  EXPECT_TRUE(worker_has_task);
  EXPECT_NE(polled.calls, 0);
  EXPECT_FALSE(gave_up) << "nobody asked while its task was waited for";
}

// A load that ends in the middle leaves neither the one nor the other: only what writes anew may
// follow. What was thrown does not matter.
class InterruptedLoad : public testing::TestWithParam<bool> {};

TEST_P(InterruptedLoad, IsNotRead) {
  Polled polled{.no_memory = GetParam()};
  const std::vector<cpu::CpuKernel> table =
      table_with(kBytesCopy.info, [](uint64_t) -> cpu::TaskFn { return copy_slowly; });
  const Device device = device_of(cpu::make_device(polled.options(1), table));
  Encoder encoder(device);
  const KvCacheOptions options{
      .kv_heads = 1,
      .head_dim = 16,
      .capacity = 8,
      .layers = std::vector<KvLayer>(4, {.k = KvFormat::f32, .v = KvFormat::f32})};
  KvCache saved(device, options), cache(device, options);
  float value = 1;
  for (KvCache* one : {&saved, &cache}) {
    const Tensor k = device.tensor(DType::f32, {2, 1, 16});
    for (float& x : k.data<float>()) x = value;
    value += 1;
    one->begin_step(encoder, 2);
    for (uint64_t layer = 0; layer < 4; ++layer) one->append(encoder, layer, k, k);
    encoder.submit();
  }
  const Folder folder;
  const std::string path = folder / "a";
  saved.save(path);
  const Tensor q = device.tensor(DType::f32, {1, 1, 16}),
               out = device.tensor(DType::f32, {1, 1, 16});
  const auto record = [&] { cache.attend(encoder, 3, {.q = q, .out = out}); };
  record();
  const Graph graph = encoder.instantiate();
  polled.on = true;
  if (polled.no_memory) {
    EXPECT_TRUE(throws_error(ErrorCode::out_of_memory, {}, [&] { cache.load(path); }));
  } else {
    EXPECT_THROW(cache.load(path), Stop);
  }
  polled.on = false;
  const std::vector<std::string> words = {"load ended in the middle"};
  const auto refused = [&](const auto& call) {
    EXPECT_TRUE(throws_error(ErrorCode::invalid_argument, words, call));
  };
  refused([&] {
    record();
    encoder.submit();
  });
  encoder.clear();
  refused([&] { graph.replay(); });
  refused([&] { cache.begin_step(encoder, 1); });
  refused([&] { cache.save(path + "b"); });
  encoder.clear();
  cache.load(path);
  graph.replay().wait();
  EXPECT_EQ(out.data<const float>()[0], 1.0f) << "of the file";
}
INSTANTIATE_TEST_SUITE_P(Throws, InterruptedLoad, testing::Bool(),
                         [](const auto& at) { return at.param ? "BadAlloc" : "Stop"; });

}  // namespace
}  // namespace gyre::test
