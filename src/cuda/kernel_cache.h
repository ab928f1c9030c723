#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace gyre::cuda {

struct CompiledKernel {
  std::string symbol;  // of the entry point
  std::vector<char> cubin;
  std::string log;  // what the compiler said; empty when it came from the cache
  bool from_cache = false;
};

// 128 bits of everything that a compilation depends on, from two hashes that share no step.
class CacheKey {
 public:
  void add(std::string_view part);
  std::string text() const;  // 32 hex digits
  uint64_t first() const { return first_; }
  uint64_t second() const { return second_; }

 private:
  void add_byte(uint8_t byte);

  uint64_t first_ = 0xCBF29CE484222325u;  // FNV-1a
  uint64_t second_ = 0x9E3779B97F4A7C15u;
};

// Compiled kernels as files of one folder, and of others that are only read: a package's or an
// image's. An entry that is damaged counts as missing; processes
// that write one at the same time leave a whole one. What cannot be written is not kept: the cache
// never fails a compilation. Thread-safe.
class KernelCache {
 public:
  // As in DeviceOptions::kernel_cache: empty for GYRE_KERNEL_CACHE, else the folder of the XDG
  // rules; "off" for none.
  explicit KernelCache(const std::string& option);

  const std::string& folder() const { return folder_; }  // empty: off
  std::optional<CompiledKernel> load(const CacheKey& key) const;
  void store(const CacheKey& key, const CompiledKernel& kernel) const;

 private:
  // Not paths: joining them takes memory in code that must not throw (libstdc++ 12).
  std::string folder_;
  std::vector<std::string> carried_;  // GYRE_KERNEL_PATH: only read
};

}  // namespace gyre::cuda
