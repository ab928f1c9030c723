#include "cuda/kernel_set.h"

#include <algorithm>

#include "runtime/kernel_code.h"
#include "runtime/require.h"

namespace gyre::cuda {

namespace {

// Every kernel that comes with its code.
constexpr CudaKernel kCustom = {.launch = [](const void* params, uint64_t spec,
                                             const CudaLimits& /*limits*/) -> Launch {
  const CustomLaunch launch = launch_of(params, spec);
  const uint32_t* const grid = launch.grid;
  // Without threads there is nothing to do either.
  return {{launch.block != 0 ? grid[0] : 0, grid[1], grid[2]}, launch.block, launch.shared_bytes};
}};

}  // namespace

const CudaKernel* KernelSet::find(const KernelInfo& kernel) const {
  const auto row =
      std::ranges::find_if(table_, [&](const CudaKernel& k) { return k.info == &kernel; });
  return row != table_.end() ? &*row : nullptr;
}

const CudaKernel* KernelSet::row(const KernelInfo& kernel, uint64_t spec) const {
  if (kernel.code != nullptr) return kernel.code->code.cuda.source.empty() ? nullptr : &kCustom;
  const CudaKernel* const row = find(kernel);
  if (row == nullptr || row->name(spec).empty()) return nullptr;
  return row->fits == nullptr || row->fits(spec, limits_) ? row : nullptr;
}

std::string KernelSet::describe(const KernelInfo& kernel, uint64_t spec) const {
  if (kernel.code != nullptr) return kernel.code->code.cuda.name;
  const CudaKernel* const row = find(kernel);
  std::string name = row != nullptr ? row->name(spec) : "";
  require(!name.empty(), "device.describe: no kernel ", kernel.name, " for this spec");
  return name;
}

bool KernelSet::plan(const KernelInfo& kernel, const void* problem, void* plan) const {
  const CudaKernel* const row = find(kernel);
  return row != nullptr && row->plan != nullptr && row->plan(problem, limits_, plan);
}

std::span<const uint64_t> KernelSet::planned_specs(const KernelInfo& kernel) const {
  const CudaKernel* const row = find(kernel);
  return row != nullptr && row->specs != nullptr ? row->specs() : std::span<const uint64_t>();
}

}  // namespace gyre::cuda
