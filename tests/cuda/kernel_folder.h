#pragma once
// Tests that count compilations: each leaves a file in a kernel cache that was empty.

#include <unistd.h>

#include <filesystem>

#include "gyre_test.h"

namespace gyre::test {

class KernelFolder : public testing::Test {
 protected:
  explicit KernelFolder(const std::string& name)
      : folder_(std::filesystem::temp_directory_path() / (name + "_" + std::to_string(getpid()))) {
    std::filesystem::remove_all(folder_);
  }
  ~KernelFolder() override { std::filesystem::remove_all(folder_); }

  DeviceOptions options() const { return {.kernel_cache = folder_.string()}; }
  long compiled() const {
    namespace fs = std::filesystem;
    if (!fs::exists(folder_)) return 0;
    return std::distance(fs::directory_iterator(folder_), fs::directory_iterator());
  }
  static uint32_t loaded(const Device& device) {
    uint32_t sum = 0;
    for (const KernelDescription& kernel : device.kernels()) sum += kernel.loaded;
    return sum;
  }

  const std::filesystem::path folder_;
};

}  // namespace gyre::test
