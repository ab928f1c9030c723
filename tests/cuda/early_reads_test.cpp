#include "cuda/early_reads.h"

#include <gtest/gtest.h>

#include <deque>
#include <initializer_list>

#include "abi/kernels.h"

namespace gyre::test {
namespace {

using cuda::early_reads;
using cuda::EarlyReads;
using cuda::PdlStart;

struct Arg {
  Access access;
  uint64_t begin, end;
  bool appended = false;
};

// Commands with arguments at any addresses.
class Commands {
 public:
  void add(std::initializer_list<Arg> args) {
    KernelInfo& info = infos_.emplace_back();
    info.arg_count = static_cast<uint32_t>(args.size());
    const auto first = static_cast<uint32_t>(list_.args.size());
    uint32_t i = 0;
    for (const Arg& arg : args) {
      info.args[i++] = {"x", arg.access, arg.appended};
      list_.args.push_back(arg.begin);
      list_.arg_bytes.push_back(arg.end - arg.begin);
    }
    list_.commands.push_back({&pipelines_.emplace_back(info, 0), 0, first, false});
  }
  // Early reads of the last command, where those from first_running on may still run.
  EarlyReads reads(size_t first_running) const {
    PdlStart start(list_.commands.size() - 1);
    start.first_running = first_running;
    return reads(start);
  }
  EarlyReads reads(const PdlStart& start) const { return early_reads(list_, start); }

 private:
  std::deque<KernelInfo> infos_;
  std::deque<Pipeline> pipelines_;
  CommandList list_;
};

constexpr Access kRead = Access::read, kWrite = Access::write, kBoth = Access::read_write;

TEST(EarlyReads, OnlyWritesOfCommandsThatMayRunCount) {
  Commands commands;
  commands.add({{kWrite, 100, 200}});
  commands.add({{kRead, 300, 400}, {kBoth, 400, 500}});
  commands.add({{kRead, 150, 160}, {kRead, 300, 400}, {kRead, 499, 510}});
  EXPECT_EQ(commands.reads(2).unwritten & 7, 7u);
  EXPECT_EQ(commands.reads(1).unwritten & 7, 3u);
  EXPECT_EQ(commands.reads(0).unwritten & 7, 2u);
}

TEST(EarlyReads, RangesThatTouchDoNotOverlap) {
  Commands commands;
  commands.add({{kWrite, 100, 200}, {kWrite, 50, 50}});
  commands.add({{kRead, 40, 100}, {kRead, 200, 210}, {kRead, 0, 0}, {kRead, 99, 101}});
  EXPECT_EQ(commands.reads(0).unwritten & 15, 7u);
}

TEST(EarlyReads, AppendsLeaveOldTokens) {
  Commands commands;
  commands.add({{kWrite, 100, 200, true}, {kWrite, 300, 400}});
  commands.add({{kRead, 100, 200}, {kRead, 300, 400}, {kRead, 500, 600}});
  EXPECT_EQ(commands.reads(0).unwritten & 7, 4u);
  EXPECT_EQ(commands.reads(0).old & 7, 5u);
}

TEST(EarlyReads, ACommandThatLaunchesFirstLeavesOlderOnesRunning) {
  PdlStart first(3);
  EXPECT_EQ(first.follow(4).first_running, 3u);
  PdlStart second = first.follow(4);
  second.launches_first = true;
  PdlStart third = second.follow(6);
  EXPECT_EQ(third.command, 6u);
  EXPECT_EQ(third.first_running, 3u);
  third.launches_first = true;
  EXPECT_EQ(third.follow(7).first_running, 3u);
  third.launches_first = false;
  EXPECT_EQ(third.follow(7).first_running, 6u);
}

TEST(EarlyReads, BehindAKernelOfOthersThereAreNone) {
  Commands commands;
  commands.add({{kRead, 100, 200}});
  PdlStart first = PdlStart::of_others().follow(0);
  EXPECT_EQ(commands.reads(first).unwritten, 0u);
  EXPECT_EQ(commands.reads(first).old, 0u);
  commands.add({{kRead, 100, 200}});
  EXPECT_EQ(commands.reads(first.follow(1)).unwritten & 1, 1u) << "the first one has waited";
  first.launches_first = true;
  EXPECT_EQ(commands.reads(first.follow(1)).unwritten, 0u);
}

}  // namespace
}  // namespace gyre::test
