#include "cuda/build_kernels.h"

#include <chrono>
#include <exception>
#include <map>
#include <string>
#include <vector>

#include "runtime/require.h"

namespace gyre::cuda {
namespace {

// One kernel, and the specs that it serves.
struct Wanted {
  std::string name;
  const CudaKernel* row = nullptr;
  std::vector<uint64_t> specs{};
  bool from_cache = true;
  double seconds = 0;
  std::exception_ptr error{};

  void make(const std::function<bool(const CudaKernel&, uint64_t)>& one) noexcept {
    const auto begin = std::chrono::steady_clock::now();
    try {
      for (const uint64_t spec : specs) from_cache = one(*row, spec) && from_cache;
    } catch (...) {
      error = std::current_exception();
    }
    seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  }
};

}  // namespace

void build_kernels(BuildQueue& queue, const KernelSet& kernels, std::span<const KernelKey> keys,
                   const BuildCallback& built,
                   const std::function<bool(const CudaKernel& row, uint64_t spec)>& make) {
  std::vector<Wanted> wanted;
  std::map<std::string, size_t> places;
  for (const KernelKey& key : keys) {
    const CudaKernel* const row = kernels.row(*key.kernel, key.spec);
    require(row != nullptr, "device.prepare: no kernel ", key.kernel->name, " for this spec");
    const auto [place, is_new] = places.try_emplace(row->name(key.spec), wanted.size());
    if (is_new) wanted.push_back({.name = place->first, .row = row});
    wanted[place->second].specs.push_back(key.spec);
  }
  std::vector<BuildQueue::Job> jobs;
  for (Wanted& one : wanted) jobs.emplace_back([&one, &make] { one.make(make); });
  uint64_t done = 0;
  queue.run_all(jobs, [&](size_t i) {
    const Wanted& one = wanted[i];
    if (one.error == nullptr)
      built({one.name, !one.from_cache, one.seconds, ++done, wanted.size()});
  });
  for (const Wanted& one : wanted) {
    if (one.error != nullptr) std::rethrow_exception(one.error);
  }
}

}  // namespace gyre::cuda
