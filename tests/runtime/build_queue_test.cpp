#include "runtime/build_queue.h"

#include <atomic>
#include <barrier>
#include <chrono>
#include <future>
#include <stdexcept>

#include "gyre_test.h"
#include "runtime/cpu_quota.h"

#if defined(__linux__)
#include <sched.h>
#endif

namespace gyre::test {
namespace {

using Jobs = std::vector<BuildQueue::Job>;

TEST(BuildQueue, RunsSeveralAtATime) {
  constexpr int kTogether = 3;
  BuildQueue queue(kTogether);
  std::barrier meet(kTogether);  // one thread alone would wait here for ever
  const Jobs jobs(kTogether, [&] { meet.arrive_and_wait(); });
  std::set<size_t> ended;
  for (int round = 0; round < 2; ++round) {
    ended.clear();
    queue.run_all(jobs, [&](size_t i) { ended.insert(i); });
    EXPECT_EQ(ended.size(), jobs.size());
  }
}

TEST(BuildQueue, TellsInTheCallersThreadAsJobsEnd) {
  BuildQueue queue(2);
  std::promise<void> second_was_told;
  const Jobs jobs = {[&] { second_was_told.get_future().wait(); }, [] {}};
  std::vector<size_t> order;
  const auto me = std::this_thread::get_id();
  queue.run_all(jobs, [&](size_t i) {
    EXPECT_EQ(std::this_thread::get_id(), me);
    order.push_back(i);
    if (i == 1) second_was_told.set_value();
  });
  EXPECT_EQ(order, (std::vector<size_t>{1, 0}));
}

TEST(BuildQueue, ThrowsAfterTheLastJob) {
  BuildQueue queue(1);
  std::atomic<int> ran = 0;
  const Jobs jobs(4, [&] { ++ran; });
  EXPECT_THROW(queue.run_all(jobs, [](size_t) { throw std::runtime_error("no"); }),
               std::runtime_error);
  EXPECT_EQ(ran, 4);
}

#if defined(__linux__)
// As the CPU backend counts: what the process may run on, not what the machine has.
TEST(BuildQueue, StaysWithinTheProcessorsOfTheProcess) {
  cpu_set_t before, one;
  ASSERT_EQ(sched_getaffinity(0, sizeof(before), &before), 0);
  CPU_ZERO(&one);
  for (size_t i = 0; CPU_COUNT(&one) == 0; ++i) {
    if (CPU_ISSET(i, &before)) CPU_SET(i, &one);
  }
  ASSERT_EQ(sched_setaffinity(0, sizeof(one), &one), 0);
  EXPECT_EQ(BuildQueue::usable_threads(), 1u);
  ASSERT_EQ(sched_setaffinity(0, sizeof(before), &before), 0);
  EXPECT_LE(BuildQueue::usable_threads(), usable_cores());
}
#endif

TEST(BuildQueue, DropsWhatHasNotBegunWhenItGoes) {
  std::promise<void> begun, go_on;
  std::atomic<int> ran = 0;
  auto queue = std::make_unique<BuildQueue>(1);
  queue->add([&] {
    begun.set_value();
    go_on.get_future().wait();
    ++ran;
  });
  queue->add([&] { ran += 100; });
  begun.get_future().wait();
  std::thread end([&] { queue.reset(); });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));  // the second job is gone by then
  go_on.set_value();
  end.join();
  EXPECT_EQ(ran, 1);
}

}  // namespace
}  // namespace gyre::test
