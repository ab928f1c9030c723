#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>

namespace gyre {

// Processors that a container may use at a time, rounded up: the least of what the process's
// control group and those above it allow. Nothing where no limit is set. `root` stands for "/", in
// tests.
std::optional<uint32_t> cpu_quota(const std::filesystem::path& root = "/");

// What the process may run on, not what the machine has: its affinity mask, and that quota.
uint32_t usable_cores();

}  // namespace gyre
