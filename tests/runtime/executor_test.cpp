#include "cpu/executor.h"

#include <sys/resource.h>

#include <cstdio>
#include <cstdlib>
#include <thread>

#include "gyre_test.h"
#include "runtime/probe.h"

namespace gyre::test {
namespace {

using cpu::Executor;

void run(Executor& executor, const ProbeRun& probe) {
  executor.run(probe.plan(), nullptr, nullptr);
}

TEST(Plan, OfNothingHasNoTickets) {
  EXPECT_EQ(ProbeRun({}).plan().tickets, 0u);
  EXPECT_EQ(ProbeRun({{.tasks = 0}, {.tasks = 0, .barrier = true}}).plan().tickets, 0u);
}

TEST(Plan, CountsTasksByTheirParts) {
  EXPECT_EQ(cpu::task_count(0, 0), 0u);
  EXPECT_EQ(cpu::task_count(7, 0), 0u);
  EXPECT_EQ(cpu::task_count(0, 5), 1u);
  EXPECT_EQ(cpu::task_count(3, 5), 3u);
  EXPECT_EQ(cpu::task_count(7, 5), 5u);
  EXPECT_EQ(cpu::task_count(uint64_t{1} << 40, uint64_t{1} << 50), 1u << 20);
}

TEST(Plan, SmallCommandsFormOneTicket) {
  const ProbeRun probe({{1, false}, {1, true}, {1, false}, {1, true}});
  EXPECT_EQ(probe.plan().tickets, 1u);
  ASSERT_EQ(probe.plan().steps.size(), 1u);
  EXPECT_EQ(probe.plan().steps[0].chain, 4u);
}

TEST(Plan, TasksAreTickets) {
  const ProbeRun probe({{4, false}, {3, false}, {2, true}});
  EXPECT_EQ(probe.plan().tickets, 9u);
  ASSERT_EQ(probe.plan().steps.size(), 3u);
  EXPECT_EQ(probe.plan().steps[1].wait_for, 0u) << "no barrier: runs beside the first";
  EXPECT_EQ(probe.plan().steps[2].wait_for, 7u);
}

TEST(Plan, WhatFollowsAChainWaitsForAllOfIt) {
  const ProbeRun probe({{1, false}, {1, true}, {4, false}});
  ASSERT_EQ(probe.plan().steps.size(), 2u);
  EXPECT_EQ(probe.plan().steps[1].wait_for, 1u);
}

TEST(Plan, ASmallCommandBesideALargeOneIsNoChain) {
  const ProbeRun probe({{4, false}, {1, false}, {1, true}, {1, false}});
  ASSERT_EQ(probe.plan().steps.size(), 3u);
  EXPECT_EQ(probe.plan().steps[1].wait_for, 0u);
  EXPECT_EQ(probe.plan().steps[2].wait_for, 5u);
  EXPECT_EQ(probe.plan().steps[2].chain, 2u);
}

// The order that the steps promise, whatever the threads do: for every pair of commands with a
// barrier between them the later one's step waits for all tickets of the earlier one, or follows it
// inside one chain.
TEST(Plan, OrdersEveryPairAcrossABarrier) {
  std::mt19937 random(3);
  for (int round = 0; round < 3000; ++round) {
    const std::vector<ProbeCommand> commands = random_commands(random);
    const ProbeRun probe(commands);
    const cpu::Plan& plan = probe.plan();
    struct Place {
      size_t step;
      uint64_t end_ticket, wait_for;
    };
    std::vector<Place> places(commands.size());
    uint64_t tickets = 0;
    for (size_t s = 0; s < plan.steps.size(); ++s) {
      const cpu::Plan::Step& step = plan.steps[s];
      ASSERT_EQ(step.first_ticket, tickets);
      ASSERT_LE(step.wait_for, step.first_ticket) << "would wait for itself";
      tickets += step.chain > 1 ? 1 : commands[step.entry].tasks;
      for (uint32_t c = step.entry; c < step.entry + step.chain; ++c)
        places[c] = {s, tickets, step.wait_for};
    }
    ASSERT_EQ(tickets, plan.tickets);
    for (size_t earlier = 0; earlier < commands.size(); ++earlier) {
      bool barrier = false;
      for (size_t later = earlier + 1; later < commands.size(); ++later) {
        barrier = barrier || commands[later].barrier;
        if (!barrier || commands[earlier].tasks == 0 || commands[later].tasks == 0) continue;
        const bool same_chain = places[earlier].step == places[later].step;
        ASSERT_TRUE(same_chain || places[later].wait_for >= places[earlier].end_ticket)
            << "round " << round << ": " << later << " does not wait for " << earlier;
      }
    }
  }
}

class ExecutorThreads : public testing::TestWithParam<uint32_t> {};

TEST_P(ExecutorThreads, RunsEveryTaskOnceAndInOrder) {
  Executor executor(GetParam(), 50);
  EXPECT_EQ(executor.threads(), GetParam());
  std::mt19937 random(GetParam());
  for (int round = 0; round < 1500; ++round) {
    ProbeRun probe(random_commands(random));
    run(executor, probe);
    ASSERT_TRUE(probe.in_order()) << "round " << round;
    probe.forget();
    run(executor, probe);
    ASSERT_TRUE(probe.in_order()) << "round " << round << " again";
  }
}

TEST_P(ExecutorThreads, SleepingWorkersWakeUp) {
  Executor executor(GetParam(), 0);
  std::mt19937 random(GetParam());
  for (int round = 0; round < 300; ++round) {
    ProbeRun probe(random_commands(random));
    run(executor, probe);
    ASSERT_TRUE(probe.in_order()) << "round " << round;
    if (round % 10 == 0) std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
}

TEST_P(ExecutorThreads, ManySubmittersTakeTurns) {
  Executor executor(GetParam(), 20);
  std::vector<std::thread> submitters;
  std::atomic<int> failures{0};
  for (uint32_t s = 0; s < 4; ++s) {
    submitters.emplace_back([&, s] {
      std::mt19937 random(s);
      for (int round = 0; round < 150; ++round) {
        ProbeRun probe(random_commands(random));
        run(executor, probe);
        if (!probe.in_order()) ++failures;
      }
    });
  }
  for (std::thread& submitter : submitters) submitter.join();
  EXPECT_EQ(failures.load(), 0);
}

// 8 is more threads than most test machines have cores.
INSTANTIATE_TEST_SUITE_P(Threads, ExecutorThreads, testing::Values(1u, 2u, 3u, 8u),
                         [](const auto& test) { return std::to_string(test.param); });

TEST(Executor, GoesAwayIdleSpinningOrAsleep) {
  for (const uint32_t spin_us : {0u, 50u, 5000u}) {
    for (int round = 0; round < 20; ++round) {
      Executor executor(4, spin_us);
      if (round % 2 == 0) {
        const ProbeRun probe({{8, false}, {8, true}});
        run(executor, probe);
        EXPECT_TRUE(probe.in_order());
      }
      if (round % 4 == 0) std::this_thread::sleep_for(std::chrono::microseconds(300));
    }
  }
}

// However long its workers would poll.
TEST(Executor, DoesNotWaitForWorkersThatSpin) {
  const auto begin = std::chrono::steady_clock::now();
  {
    Executor executor(4, 60'000'000);
    run(executor, ProbeRun({{8, false}, {8, true}}));
  }
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(10));
}

// Two tasks that wait for each other finish only if two threads work on the command.
struct Meeting {
  std::atomic<uint32_t> arrived{0};
  std::atomic<bool> met{true};
};

void meet(const void*, const uint64_t* args, uint32_t, uint32_t tasks) noexcept {
  auto& meeting = *cpu::pointer<Meeting>(args[0]);
  meeting.arrived.fetch_add(1);
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (meeting.arrived.load() < tasks) {
    std::this_thread::yield();
    if (std::chrono::steady_clock::now() > end) {
      meeting.met = false;
      return;
    }
  }
}

// Address space for some of the threads, not for all: those that started must end again.
[[noreturn]] void open_too_many_threads() {
  rlimit limit{};
  getrlimit(RLIMIT_AS, &limit);
  limit.rlim_cur = rlim_t{512} << 20;
  setrlimit(RLIMIT_AS, &limit);
  try {
    const Executor executor(1000, 0);
  } catch (const Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    std::_Exit(error.code() == ErrorCode::out_of_memory ? 0 : 1);
  }
  std::_Exit(2);
}

TEST(ExecutorDeathTest, RefusesThreadsThatCannotStart) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "the sanitizers need all of the address space";
#endif
  EXPECT_EXIT(open_too_many_threads(), testing::ExitedWithCode(0),
              "device.open: thread [0-9]+ of 1000 could not be started");
}

TEST(Executor, TasksOfACommandRunAtTheSameTime) {
  for (const uint32_t spin_us : {0u, 50u}) {
    Executor executor(3, spin_us);
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    Meeting meeting;
    ProbeParams params{0, 3, 0};
    CommandList list;
    list.params.resize(2);
    std::memcpy(list.params.data(), &params, sizeof(params));
    list.args = {reinterpret_cast<uintptr_t>(&meeting)};
    const cpu::CpuPipeline pipeline(*kProbeKernel.info, kProbeKernel, 0, meet);
    list.commands.push_back({&pipeline, 0, 0, false});
    cpu::Plan plan;
    plan.build(list);
    executor.run(plan, nullptr, nullptr);
    EXPECT_TRUE(meeting.met.load()) << "spin " << spin_us;
  }
}

TEST(Executor, NotesWhichThreadRanWhat) {
  Executor executor(2, 50);
  TraceLog log;
  log.start();
  const ProbeRun probe({{1, false}, {1, true}, {5, true}, {0, false}});
  std::vector<TraceLog::Timing> timings;
  executor.run(probe.plan(), &log, &timings);
  std::vector<int> count(4);
  for (const TraceLog::Timing& timing : timings) {
    ++count.at(timing.command);
    EXPECT_LE(timing.span.begin_ns, timing.span.end_ns);
    EXPECT_LT(timing.span.thread, 2u);
  }
  EXPECT_EQ(count, (std::vector<int>{1, 1, 5, 0}));
}

}  // namespace
}  // namespace gyre::test
