#pragma once

#include <cstdint>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>

#include "cuda/kernel_cache.h"
#include "cuda/nvrtc.h"

namespace gyre::cuda {

struct CompileJob {
  std::string_view file;  // in src/cuda/kernels; what `text` is called
  std::string name;       // the name expression
  std::string_view options = {};
  uint32_t arch = 0;           // 90
  std::string_view text = {};  // a source that is not the library's
};

// Throws compile_failed with the compiler's log.
CompiledKernel compile(const Nvrtc& nvrtc, const CompileJob& job);

// Compiles through the cache. What several threads want at the same time is compiled once.
// Thread-safe.
class KernelCompiler {
 public:
  using Kernel = std::shared_ptr<const CompiledKernel>;

  // `cache` as in DeviceOptions::kernel_cache.
  KernelCompiler(const Nvrtc& nvrtc, const std::string& cache) : nvrtc_(nvrtc), cache_(cache) {}

  Kernel get(const CompileJob& job);

 private:
  Kernel make(const CacheKey& key, const CompileJob& job) const;

  const Nvrtc& nvrtc_;
  const KernelCache cache_;
  std::mutex mutex_;
  std::map<std::string, std::shared_future<Kernel>> in_progress_;  // by key
};

}  // namespace gyre::cuda
