#include "runtime/cpu_quota.h"

#include <algorithm>
#include <fstream>
#include <string>
#include <thread>

#if defined(__linux__)
#include <sched.h>
#endif

namespace gyre {
namespace {

// Paths are strings: fs::path of libstdc++ 12 crashes where "/" finds no memory.

std::optional<uint32_t> processors(uint64_t quota, uint64_t period) {
  constexpr uint64_t kMax = 1 << 20;
  if (quota == 0 || period == 0) return {};
  const uint64_t count = quota / period + (quota % period != 0 ? 1 : 0);
  return static_cast<uint32_t>(std::min(count, kMax));
}

// Version 2: "200000 100000" or "max 100000".
std::optional<uint32_t> read_v2(const std::string& group) {
  std::ifstream file(group + "/cpu.max");
  uint64_t quota = 0, period = 0;
  if (!(file >> quota >> period)) return {};
  return processors(quota, period);
}

// Version 1: a quota of -1 means no quota.
std::optional<uint32_t> read_v1(const std::string& group) {
  std::ifstream quota_file(group + "/cpu.cfs_quota_us"), period_file(group + "/cpu.cfs_period_us");
  int64_t quota = 0, period = 0;
  if (!(quota_file >> quota) || !(period_file >> period) || quota <= 0 || period <= 0) return {};
  return processors(static_cast<uint64_t>(quota), static_cast<uint64_t>(period));
}

// The group and all above it, down to where the controller is mounted. In a container the mount is
// often the group itself, and the path that the process is told does not exist below it.
template <class Read>
std::optional<uint32_t> least(const std::string& mount, std::string group, const Read& read) {
  std::optional<uint32_t> result;
  for (;;) {
    const std::optional<uint32_t> here = read(mount + group);
    if (here) result = std::min(result.value_or(*here), *here);
    if (group.empty()) return result;
    group.resize(std::min(group.find_last_of('/'), group.size() - 1));
  }
}

bool lists_cpu(const std::string& controllers) {
  return ("," + controllers + ",").find(",cpu,") != std::string::npos;
}

}  // namespace

std::optional<uint32_t> cpu_quota(const std::filesystem::path& root) {
  const std::string mounts = root.string() + "/sys/fs/cgroup/";
  std::ifstream groups(root.string() + "/proc/self/cgroup");
  std::optional<uint32_t> result;
  const auto take = [&](const std::optional<uint32_t>& found) {
    if (found) result = std::min(result.value_or(*found), *found);
  };
  // "0::/path" for version 2, "4:cpu,cpuacct:/path" for version 1.
  for (std::string line; std::getline(groups, line);) {
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const std::string group = line.substr(second + 1);  // "/path"
    if (controllers.empty()) take(least(mounts, group, read_v2));
    if (lists_cpu(controllers)) {
      take(least(mounts + controllers, group, read_v1));
      take(least(mounts + "cpu", group, read_v1));
    }
  }
  return result;
}

namespace {

uint32_t allowed_cores() {
#if defined(__linux__)
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof(set), &set) == 0) {
    const int count = CPU_COUNT(&set);
    if (count > 0) return static_cast<uint32_t>(count);
  }
#endif
  const uint32_t count = std::thread::hardware_concurrency();
  return count != 0 ? count : 1;
}

}  // namespace

uint32_t usable_cores() {
  const uint32_t allowed = allowed_cores();
  return std::min(allowed, cpu_quota().value_or(allowed));
}

}  // namespace gyre
