#include "cuda/build_kernels.h"

#include <map>
#include <string>
#include <vector>

#include "runtime/build_all.h"
#include "runtime/require.h"

namespace gyre::cuda {
namespace {

// One kernel, and the specs that it serves.
struct Wanted {
  std::string name;
  const CudaKernel* row = nullptr;
  std::vector<uint64_t> specs{};
};

}  // namespace

void build_kernels(BuildQueue& queue, const KernelSet& kernels, std::span<const KernelKey> keys,
                   const BuildCallback& built,
                   const std::function<bool(const CudaKernel& row, uint64_t spec)>& make) {
  std::vector<Wanted> wanted;
  std::map<std::string, size_t> places;
  for (const KernelKey& key : keys) {
    const CudaKernel* const row = kernels.row(*key.kernel, key.spec);
    require(row != nullptr, "prepare: no kernel ", key.kernel->name, " for this spec");
    const auto [place, is_new] = places.try_emplace(row->name(key.spec), wanted.size());
    if (is_new) wanted.push_back({.name = place->first, .row = row});
    wanted[place->second].specs.push_back(key.spec);
  }
  std::vector<BuildTask> tasks;
  for (const Wanted& one : wanted) {
    tasks.push_back({one.name, [&one, &make] {
                       bool from_cache = true;
                       for (const uint64_t spec : one.specs)
                         from_cache = make(*one.row, spec) && from_cache;
                       return from_cache;
                     }});
  }
  build_all(queue, tasks, built);
}

}  // namespace gyre::cuda
