#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "runtime/command_list.h"

namespace gyre {

// One per device. A pipeline is made once and stays where it is until the device goes, so pointers
// handed out remain valid. That there is no such kernel is remembered as well. The lock is held
// while one is made: what takes long, a pipeline does later (Pipeline::finish).
class PipelineCache {
 public:
  // make() returns std::unique_ptr<Pipeline>, null if the device has no such kernel.
  template <class Make>
  const Pipeline* find_or_make(const KernelInfo& kernel, uint64_t spec, const Make& make) {
    const std::lock_guard lock(mutex_);
    const Key key{&kernel, spec};
    auto found = entries_.find(key);
    if (found == entries_.end()) found = entries_.emplace(key, make()).first;
    return found->second.get();
  }

  uint32_t count(const KernelInfo& kernel) const {
    const std::lock_guard lock(mutex_);
    return static_cast<uint32_t>(std::count_if(
        entries_.lower_bound({&kernel, 0}), entries_.upper_bound({&kernel, ~uint64_t{0}}),
        [](const auto& entry) { return entry.second != nullptr && entry.second->is_built(); }));
  }

 private:
  using Key = std::pair<const KernelInfo*, uint64_t>;

  mutable std::mutex mutex_;
  std::map<Key, std::unique_ptr<Pipeline>> entries_;  // null: there is none
};

}  // namespace gyre
