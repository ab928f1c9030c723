#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "runtime/command_list.h"

namespace gyre {

// One per device. A pipeline is built once and stays where it is until the device goes, so pointers
// handed out remain valid. A failed build is not remembered.
class PipelineCache {
 public:
  // make() returns std::unique_ptr<Pipeline>, null if the device has no such kernel.
  template <class Make>
  const Pipeline* find_or_make(const KernelInfo& kernel, uint64_t spec, const Make& make) {
    const std::lock_guard lock(mutex_);
    const Key key{&kernel, spec};
    if (const auto found = pipelines_.find(key); found != pipelines_.end())
      return found->second.get();
    std::unique_ptr<Pipeline> made = make();
    if (made == nullptr) return nullptr;
    return pipelines_.emplace(key, std::move(made)).first->second.get();
  }

  uint32_t count(const KernelInfo& kernel) const {
    const std::lock_guard lock(mutex_);
    const auto begin = pipelines_.lower_bound({&kernel, 0});
    const auto end = pipelines_.upper_bound({&kernel, ~uint64_t{0}});
    return static_cast<uint32_t>(std::distance(begin, end));
  }

 private:
  using Key = std::pair<const KernelInfo*, uint64_t>;

  mutable std::mutex mutex_;
  std::map<Key, std::unique_ptr<Pipeline>> pipelines_;
};

}  // namespace gyre
