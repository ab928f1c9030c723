// The n-th allocation fails, for every n of programs that use the whole library: each call throws
// out_of_memory and changes nothing, or succeeds.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <new>
#include <thread>

#include "expect_error.h"
#include "folder.h"
#include "runtime/build_queue.h"
#include "runtime/hazard.h"
#include "runtime/require.h"
#include "stress/allocation_programs.h"

namespace gyre::test {
namespace {

class Allocation : public testing::TestWithParam<AllocationProgram> {
 protected:
  Allocation() { std::filesystem::create_directories(folder_); }
  ~Allocation() override { std::filesystem::remove_all(folder_); }

  // In a process that has used nothing of the library: what is made on first use fails as well.
  int run_apart(uint64_t at, uint64_t fails, const std::vector<uint8_t>& expected) const {
    const pid_t child = fork();
    if (child == 0) {
      int status = 1;
      try {
        failing_memory().arm(at, fails);
        status = GetParam().run(folder_) == expected ? 0 : 2;
      } catch (const std::exception& error) {
        std::fprintf(stderr, "allocation %llu: %s\n", static_cast<unsigned long long>(at),
                     error.what());
      }
      _exit(status);
    }
    int status = 0;
    waitpid(child, &status, 0);
    return status;
  }

  const std::string folder_ =
      testing::TempDir() + "gyre_allocation_" + std::to_string(getpid()) + GetParam().name;
};

uint64_t wanted_stride(uint64_t usual) {
  const char* const text = std::getenv("GYRE_STRESS_STRIDE");
  return text != nullptr ? std::strtoull(text, nullptr, 10) : usual;
}

// First, before this process has used the library: children inherit what it has made.
TEST_P(Allocation, ChildrenThatBeginWithNothingSurvive) {
  // What comes out and how many allocations there are, from a child: this process stays clean.
  int ends[2] = {};
  ASSERT_EQ(pipe(ends), 0);
  const pid_t child = fork();
  if (child == 0) {
    failing_memory().arm(~uint64_t{0}, 0);
    const std::vector<uint8_t> bytes = GetParam().run(folder_);
    const uint64_t count = failing_memory().count;
    ssize_t put = write(ends[1], &count, sizeof(count));
    for (size_t at = 0; put > 0 && at < bytes.size(); at += static_cast<size_t>(put))
      put = write(ends[1], bytes.data() + at, bytes.size() - at);
    _exit(put > 0 ? 0 : 1);
  }
  close(ends[1]);
  uint64_t count = 0;
  ASSERT_EQ(read(ends[0], &count, sizeof(count)), static_cast<ssize_t>(sizeof(count)));
  std::vector<uint8_t> expected;
  uint8_t buffer[4096];
  for (ssize_t got = 0; (got = read(ends[0], buffer, sizeof(buffer))) > 0;)
    expected.insert(expected.end(), buffer, buffer + got);
  close(ends[0]);
  int status = 0;
  waitpid(child, &status, 0);
  ASSERT_EQ(status, 0);
  const uint64_t stride = wanted_stride(23);
  uint64_t tried = 0;
  for (uint64_t at = 0; at < count; at += stride, ++tried)
    ASSERT_EQ(run_apart(at, 1, expected), 0) << "allocation " << at << " of " << count;
  // Not even memory for a message.
  for (uint64_t at = 1; at < count; at += 5 * stride, ++tried)
    ASSERT_EQ(run_apart(at, 12, expected), 0) << "allocations from " << at << " of " << count;
  std::printf("%s: %llu of %llu allocations failed, each in a process of its own\n",
              GetParam().name.c_str(), static_cast<unsigned long long>(tried),
              static_cast<unsigned long long>(count));
}

TEST_P(Allocation, EveryOneMayFail) {
  GetParam().run(folder_);  // what is made once is there
  failing_memory().arm(~uint64_t{0}, 0);
  const std::vector<uint8_t> expected = GetParam().run(folder_);
  const uint64_t count = failing_memory().count;
  ASSERT_GT(count, 50u);
  uint64_t hit = 0;
  for (uint64_t at = 0; at < count; ++at) {
    failing_memory().arm(at, at % 5 == 4 ? 9 : 1);
    SCOPED_TRACE("allocation " + std::to_string(at) + " of " + std::to_string(count));
    try {
      ASSERT_EQ(GetParam().run(folder_), expected);
    } catch (const std::exception& error) {
      FAIL() << error.what();
    }
    if (failing_memory().failed != 0)
      ++hit;
    else
      ASSERT_LE(failing_memory().count, at) << "it was reached, and did not fail";
  }
  // A trace has a span for each thread that took part, so a run may be a few allocations shorter.
  EXPECT_GE(hit * 100, count * 98) << hit << " of " << count << " failed";
  std::printf("%s: each of %llu allocations failed\n", GetParam().name.c_str(),
              static_cast<unsigned long long>(hit));
}

INSTANTIATE_TEST_SUITE_P(Of, Allocation,
                         testing::Values(AllocationProgram{"ops", run_ops},
                                         AllocationProgram{"calls", run_calls},
                                         AllocationProgram{"cache", run_cache},
                                         AllocationProgram{"pool", run_pool}),
                         [](const auto& at) { return at.param.name; });

// Tasks cannot fail, so they take no memory: what attention needs is taken when a graph is made.
TEST(OutOfMemory, EveryFormIsCounted) {
  const auto is_counted = [](const auto& call) {
    failing_memory().count_from_here();
    call();
    return failing_memory().stop() == 1;
  };
  constexpr std::align_val_t kAlign{64};
  EXPECT_TRUE(is_counted([] { ::operator delete(::operator new(8)); }));
  EXPECT_TRUE(is_counted([] { ::operator delete[](::operator new[](8)); }));
  EXPECT_TRUE(is_counted([] { ::operator delete(::operator new(8, std::nothrow)); }));
  EXPECT_TRUE(is_counted([] { ::operator delete[](::operator new[](8, std::nothrow)); }));
  EXPECT_TRUE(is_counted([] { ::operator delete(::operator new(8, kAlign), kAlign); }));
  EXPECT_TRUE(is_counted([] { ::operator delete[](::operator new[](8, kAlign), kAlign); }));
  EXPECT_TRUE(
      is_counted([] { ::operator delete(::operator new(8, kAlign, std::nothrow), kAlign); }));
  EXPECT_TRUE(
      is_counted([] { ::operator delete[](::operator new[](8, kAlign, std::nothrow), kAlign); }));
}

TEST(OutOfMemory, AReplayTakesNoMemory) {
  constexpr uint64_t kHeads = 4, kKvHeads = 2, kDim = 256, kKeys = 700;
  for (const KvFormat format : {KvFormat::f16, KvFormat::tq4, KvFormat::mlx_native4}) {
    for (const uint64_t tokens : {1u, 3u, 40u}) {
      SCOPED_TRACE(std::string(name(format)) + " " + std::to_string(tokens));
      const Device device = Device::open("cpu", {.threads = 3});
      const Tensor q = device.tensor(DType::f32, {tokens, kHeads, kDim});
      const Tensor k = device.tensor(DType::f32, {kKeys, kKvHeads, kDim});
      const Tensor out = device.tensor(DType::f32, {tokens, kHeads, kDim});
      for (float& value : q.data<float>()) value = 0.25f;
      for (float& value : k.data<float>()) value = 0.5f;
      const auto buffer = [&](KvRole role) {
        return KvBuffer::allocate(device, {format, role, kKvHeads, kKeys, kDim});
      };
      const KvBuffer k_cache = buffer(KvRole::k), v_cache = buffer(KvRole::v);
      Encoder encoder(device);
      if (describe(format).compressed) {
        kv_quantize(encoder, {k, k_cache, k, v_cache});
      } else {
        const Dims order = {1, 0, 2};
        kv_copy(encoder, {k, k_cache.codes.permute(order), k, v_cache.codes.permute(order)});
      }
      attention(encoder, {q, k_cache, v_cache, out}, {.length = kKeys, .scale = 0.1f});
      const Graph graph = encoder.instantiate();
      {
        const FailingAllocations all(0, ~uint64_t{0});
        graph.replay().wait();
      }
      EXPECT_EQ(failing_memory().failed, 0u);
      EXPECT_NEAR(out.data<const float>()[0], 0.5f, 0.2f);
    }
  }
}

// A new group of commands whose ranges find no memory: after going back the old group is known.
TEST(OutOfMemory, HazardsAreNotForgotten) {
  HazardTracker hazards;
  const RangeAccess write{{0, 64}, Access::write};
  hazards.add({&write, 1});
  const HazardTracker::Mark mark = hazards.mark();
  // Reads the write, and more ranges than there is room for.
  std::vector<RangeAccess> many;
  for (uint64_t i = 0; i < 64; ++i) many.push_back({{i * 128, i * 128 + 8}, Access::read});
  bool thrown_after_log = false;
  for (uint64_t at = 0; at < 8; ++at) {
    bool thrown = false;
    try {
      const FailingAllocations failing(at);
      hazards.add(many);
    } catch (const std::bad_alloc&) {
      thrown = true;
    }
    if (!thrown) break;
    thrown_after_log = thrown_after_log || at > 0;
    hazards.rollback(mark);
    const RangeAccess read{{32, 40}, Access::read};
    ASSERT_TRUE(hazards.add({&read, 1})) << "the barrier is lost after allocation " << at;
    hazards.rollback(mark);
  }
  EXPECT_TRUE(thrown_after_log);
}

// Jobs see what is the caller's: all that were added have ended when the call does.
TEST(OutOfMemory, ABuildLeavesNoJobsBehind) {
  constexpr int kJobs = 6;
  uint64_t refused = 0;
  for (uint64_t at = 0; at < 30; ++at) {
    BuildQueue queue(2);
    std::atomic<int> ran{0};
    const std::vector<BuildQueue::Job> jobs(kJobs, [&ran] {
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
      ++ran;
    });
    const std::function<void(size_t)> done = [](size_t) {};
    bool thrown = false;
    try {
      const FailingAllocations failing(at);
      queue.run_all(jobs, done);
    } catch (const std::bad_alloc&) {
      thrown = true;
    } catch (const Error& error) {
      thrown = error.code() == ErrorCode::out_of_memory;
    }
    const int before = ran;
    std::this_thread::sleep_for(std::chrono::milliseconds(8));
    ASSERT_EQ(ran, before) << "jobs ran on after allocation " << at << " failed";
    if (!thrown) {
      ASSERT_EQ(before, kJobs);
    }
    refused += thrown ? 1 : 0;
  }
  EXPECT_GT(refused, 3u);
}

// A call that is refused without memory, for every n: only gyre::Error leaves it.
template <class Call>
uint64_t refused_without_memory(const Call& call) {
  uint64_t at = 0;
  for (bool failed = true; failed; ++at) {
    std::string other;
    try {
      const FailingAllocations failing(at);
      call();
      other = "it was not refused";
    } catch (const Error&) {
    } catch (...) {
      other = "something else than gyre::Error left it";
    }
    EXPECT_EQ(other, "") << "allocation " << at;
    failed = failing_memory().failed != 0;
  }
  return at;
}

// Many layers: a text of what is missing is long.
TEST(OutOfMemory, RefusalsOfAStepAreOurs) {
  const Device device = Device::open("cpu", {.threads = 1});
  KvPoolOptions options{.kv_heads = 1, .head_dim = 16, .pages = 8, .page_tokens = 8};
  options.layers.resize(24);
  const KvPool pool(device, options);
  KvBatch batch(pool, {.max_sequences = 1, .max_tokens = 8});
  KvSequence sequence = pool.sequence();
  Encoder encoder(device);
  batch.begin_step(encoder, std::vector<KvStep>{{sequence, 1}});
  const Tensor k = device.tensor(DType::f32, {1, 1, 16});
  batch.append(encoder, 0, k, k);
  EXPECT_GT(refused_without_memory([&] { batch.end_step(); }), 2u);
  EXPECT_GT(refused_without_memory([&] { batch.record(); }), 2u);
  EXPECT_GT(refused_without_memory([&] { sequence.rollback(0); }), 2u);
  EXPECT_GT(refused_without_memory([&] { sequence.clear(); }), 2u);
  batch.rollback();
}

TEST(OutOfMemory, APrefixIsPublishedAsAWholeOrNotAtAll) {
  constexpr uint64_t kPages = 6, kTokens = 8 * kPages;
  const Device device = Device::open("cpu", {.threads = 1});
  const KvPool pool(device, {.kv_heads = 1, .head_dim = 16, .pages = kPages, .page_tokens = 8});
  KvBatch batch(pool, {.max_sequences = 1, .max_tokens = kTokens});
  KvSequence sequence = pool.sequence();
  Encoder encoder(device);
  batch.begin_step(encoder, std::vector<KvStep>{{sequence, kTokens}});
  const Tensor k = device.tensor(DType::f32, {kTokens, 1, 16});
  batch.append(encoder, 0, k, k);
  encoder.submit().wait();
  const std::vector<int32_t> tokens(kTokens, 5);
  uint64_t refused = 0;
  for (bool failed = true; failed; ++refused) {
    try {
      const FailingAllocations failing(refused);
      pool.publish(sequence, tokens);
    } catch (const Error&) {
    }
    failed = failing_memory().failed != 0;
    ASSERT_EQ(pool.describe().prefixes, failed ? 0 : kPages) << "allocation " << refused;
    ASSERT_EQ(pool.match(tokens).length(), failed ? 0 : kTokens) << "allocation " << refused;
  }
  EXPECT_GT(refused, kPages);
}

// Pages that a step drops from the front of a window come back with it.
TEST(OutOfMemory, AStepThatFailsKeepsTheWindow) {
  const Device device = Device::open("cpu", {.threads = 1});
  const Tensor k = device.tensor(DType::f32, {8, 1, 16});
  uint64_t refused = 0;
  for (bool failed = true; failed; ++refused) {
    // New ones: those that have worked before take no memory.
    const KvPool pool(device, {.kv_heads = 1,
                               .head_dim = 16,
                               .layers = {{.k = KvFormat::f16, .v = KvFormat::f16, .window = 16}},
                               .pages = 16,
                               .page_tokens = 8});
    KvBatch batch(pool, {.max_sequences = 1, .max_tokens = 8});
    KvSequence sequence = pool.sequence();
    Encoder encoder(device), fresh(device);
    for (int i = 0; i < 5; ++i) {
      batch.begin_step(encoder, std::vector<KvStep>{{sequence, 8}});
      batch.append(encoder, 0, k, k);
      encoder.submit().wait();
    }
    const uint64_t free = pool.describe().groups[0].free;
    const std::vector<KvStep> step = {{sequence, 1}};
    try {
      const FailingAllocations failing(refused);
      batch.begin_step(fresh, step);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::out_of_memory);
      ASSERT_EQ(pool.describe().groups[0].free, free) << "allocation " << refused;
      sequence.rollback(8);
      ASSERT_EQ(sequence.length(), 32u);
    }
    failed = failing_memory().failed != 0;
  }
  EXPECT_GT(refused, 3u);
}

TEST(OutOfMemory, ASaveLeavesNoFileBehind) {
  const Folder folder;
  const Device device = Device::open("cpu", {.threads = 1});
  const KvCache cache(device, {.kv_heads = 1, .head_dim = 16, .capacity = 8});
  const std::string path = folder / "a";
  uint64_t refused = 0;
  for (bool failed = true; failed; ++refused) {
    try {
      const FailingAllocations failing(refused);
      cache.save(path);
    } catch (const Error&) {
    }
    failed = failing_memory().failed != 0;
    ASSERT_EQ(folder.files(), failed ? 0u : 1u) << "allocation " << refused;
    if (!failed) break;
  }
  EXPECT_GT(refused, 60u);
}

TEST(OutOfMemory, AMessageThatFindsNoMemoryKeepsItsCode) {
  for (const ErrorCode code :
       {ErrorCode::invalid_argument, ErrorCode::io, ErrorCode::device_lost}) {
    for (uint64_t at = 0; at < 4; ++at) {
      ErrorCode is = ErrorCode::unsupported;
      try {
        const FailingAllocations failing(at, 100);
        fail(code, "a message that is too long for the string's own room: ", 12345);
      } catch (const Error& error) {
        is = error.code();
      }
      EXPECT_EQ(is, code);
    }
  }
}

}  // namespace
}  // namespace gyre::test
