// Limits of containers, read from folders made here.
#include "runtime/cpu_quota.h"

#include <fstream>

#include "gyre_test.h"

namespace gyre {
namespace {

namespace fs = std::filesystem;

class CpuQuota : public testing::Test {
 protected:
  void SetUp() override {
    root_ = fs::path(testing::TempDir()) /
            testing::UnitTest::GetInstance()->current_test_info()->name();
    fs::remove_all(root_);
  }
  void TearDown() override { fs::remove_all(root_); }
  void write(const std::string& path, const std::string& text) const {
    fs::create_directories((root_ / path).parent_path());
    std::ofstream(root_ / path) << text << '\n';
  }
  std::optional<uint32_t> quota() const { return cpu_quota(root_); }

 private:
  fs::path root_;
};

TEST_F(CpuQuota, NoneWithoutControlGroups) {
  EXPECT_EQ(quota(), std::nullopt);
  write("proc/self/cgroup", "0::/");
  EXPECT_EQ(quota(), std::nullopt);
  write("sys/fs/cgroup/cpu.max", "max 100000");
  EXPECT_EQ(quota(), std::nullopt);
}

TEST_F(CpuQuota, RoundsUp) {
  write("proc/self/cgroup", "0::/");
  write("sys/fs/cgroup/cpu.max", "150000 100000");
  EXPECT_EQ(quota(), 2u);
  write("sys/fs/cgroup/cpu.max", "400000 100000");
  EXPECT_EQ(quota(), 4u);
  write("sys/fs/cgroup/cpu.max", "1 100000");
  EXPECT_EQ(quota(), 1u);
}

TEST_F(CpuQuota, TakesTheLeastOfAllGroupsAbove) {
  write("proc/self/cgroup", "0::/pods/one/engine");
  write("sys/fs/cgroup/pods/cpu.max", "800000 100000");
  write("sys/fs/cgroup/pods/one/cpu.max", "300000 100000");
  write("sys/fs/cgroup/pods/one/engine/cpu.max", "max 100000");
  EXPECT_EQ(quota(), 3u);
  write("sys/fs/cgroup/pods/cpu.max", "200000 100000");
  EXPECT_EQ(quota(), 2u);
}

TEST_F(CpuQuota, FindsTheMountThatIsTheGroupItself) {
  write("proc/self/cgroup", "0::/docker/0123456789abcdef");
  write("sys/fs/cgroup/cpu.max", "200000 100000");
  EXPECT_EQ(quota(), 2u);
}

TEST_F(CpuQuota, ReadsVersionOne) {
  write("proc/self/cgroup", "11:memory:/a\n4:cpu,cpuacct:/a\n1:name=systemd:/a");
  write("sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_quota_us", "250000");
  write("sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_period_us", "100000");
  EXPECT_EQ(quota(), 3u);
  write("sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_quota_us", "-1");
  EXPECT_EQ(quota(), std::nullopt);
}

TEST_F(CpuQuota, IgnoresWhatIsDamaged) {
  for (const char* text : {"", "x y", "100000", "100000 0", "0 100000", "-5 100000"}) {
    write("proc/self/cgroup", "0::/");
    write("sys/fs/cgroup/cpu.max", text);
    EXPECT_EQ(quota().value_or(1u << 20), 1u << 20) << text;
  }
  write("proc/self/cgroup", "no colons\n:\n0:");
  EXPECT_EQ(quota(), std::nullopt);
}

TEST_F(CpuQuota, LimitsTheThreadsOfADevice) {
  EXPECT_LE(usable_cores(), cpu_quota().value_or(usable_cores()));
  EXPECT_EQ(Device::open("cpu", {.threads = 3}).info().compute_units, 3u) << "as asked for";
}

}  // namespace
}  // namespace gyre
