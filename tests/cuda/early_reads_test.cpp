#include "cuda/early_reads.h"

#include <gtest/gtest.h>

#include <deque>
#include <initializer_list>

#include "abi/kernels.h"

namespace gyre::test {
namespace {

using cuda::EarlyReads;
using cuda::RunningWrites;

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
  // What the last command may read early.
  EarlyReads reads(const RunningWrites& running) const {
    return running.early_reads(list_, list_.commands.back());
  }
  RunningWrites after(size_t command, const RunningWrites& running = {},
                      bool launches_first = false) const {
    return running.after(list_, list_.commands[command], launches_first);
  }

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
  EXPECT_EQ(commands.reads({}).unwritten & 7, 7u);
  EXPECT_EQ(commands.reads(commands.after(1)).unwritten & 7, 3u);
  EXPECT_EQ(commands.reads(commands.after(1, commands.after(0), true)).unwritten & 7, 2u);
}

TEST(EarlyReads, RangesThatTouchDoNotOverlap) {
  Commands commands;
  commands.add({{kWrite, 100, 200}, {kWrite, 50, 50}});
  commands.add({{kRead, 40, 100}, {kRead, 200, 210}, {kRead, 0, 0}, {kRead, 99, 101}});
  EXPECT_EQ(commands.reads(commands.after(0)).unwritten & 15, 7u);
}

TEST(EarlyReads, AppendsLeaveOldTokens) {
  Commands commands;
  commands.add({{kWrite, 100, 200, true}, {kWrite, 300, 400}});
  commands.add({{kRead, 100, 200}, {kRead, 300, 400}, {kRead, 500, 600}});
  EXPECT_EQ(commands.reads(commands.after(0)).unwritten & 7, 4u);
  EXPECT_EQ(commands.reads(commands.after(0)).old & 7, 5u);
}

// The second write's tokens are the newest; those of the first are old ones that still come.
TEST(EarlyReads, AppendsBehindAppendsAreNotOld) {
  Commands commands;
  commands.add({{kWrite, 100, 200, true}, {kWrite, 300, 400, true}});
  commands.add({{kWrite, 100, 200, true}});
  commands.add({{kRead, 100, 200}, {kRead, 300, 400}});
  const RunningWrites first = commands.after(0);
  EXPECT_EQ(commands.reads(commands.after(1, first, true)).old & 3, 2u);
  EXPECT_EQ(commands.reads(commands.after(1, first, false)).old & 3, 3u);
}

TEST(EarlyReads, ACommandThatWaitsFirstLeavesNothingOlderRunning) {
  Commands commands;
  commands.add({{kWrite, 100, 200}});
  commands.add({{kWrite, 300, 400}});
  commands.add({{kRead, 100, 200}, {kRead, 300, 400}});
  const RunningWrites first = commands.after(0);
  EXPECT_EQ(commands.reads(commands.after(1, first, false)).unwritten & 3, 1u);
  EXPECT_EQ(commands.reads(commands.after(1, first, true)).unwritten & 3, 0u);
}

TEST(EarlyReads, BesideAKernelOfOthersThereAreNone) {
  Commands commands;
  commands.add({{kRead, 100, 200}});
  const RunningWrites unknown = RunningWrites::unknown();
  EXPECT_EQ(commands.reads(unknown).unwritten, 0u);
  EXPECT_EQ(commands.reads(unknown).old, 0u);
  EXPECT_FALSE(commands.after(0, unknown, true).is_known());
  EXPECT_EQ(commands.reads(commands.after(0, unknown, true)).unwritten, 0u);
  EXPECT_EQ(commands.reads(commands.after(0, unknown, false)).unwritten & 1, 1u);
}

}  // namespace
}  // namespace gyre::test
