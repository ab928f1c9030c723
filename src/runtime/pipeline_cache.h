#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "runtime/command_list.h"

namespace gyre {

// One per device. A pipeline is made once. Those of the tables stay until the device goes, so
// pointers to them remain valid; that there is no such kernel is remembered as well. Those of
// custom kernels stay as long as a handle could record them; lists and graphs hold what they use
// (CommandList::pipelines). The lock is held while one is made: what takes long, a pipeline does
// later (Pipeline::finish).
class PipelineCache {
 public:
  // make() returns a pointer to a Pipeline that owns it, null if the device has no such kernel.
  template <class Make>
  std::shared_ptr<const Pipeline> find_or_make(const KernelInfo& kernel, uint64_t spec,
                                               const Make& make) {
    Entries dropped;  // goes after the lock: a pipeline's end calls the driver
    const std::lock_guard lock(mutex_);
    const Key key{&kernel, spec};
    Entries& entries = of(kernel);
    if (const auto found = entries.find(key); found != entries.end()) return found->second;
    if (kernel.code != nullptr && custom_.size() >= sweep_at_) sweep(dropped);
    std::shared_ptr<const Pipeline> made = make();
    // An absent custom kernel holds no code, whose address may be another's tomorrow.
    if (made != nullptr || kernel.code == nullptr) entries.emplace(key, made);
    return made;
  }

  // Forgets custom kernels that no handle can record any more.
  void trim() {
    Entries dropped;
    const std::lock_guard lock(mutex_);
    sweep(dropped);
  }

  uint32_t count(const KernelInfo& kernel) const {
    const std::lock_guard lock(mutex_);
    const Entries& entries = of(kernel);
    return static_cast<uint32_t>(std::count_if(
        entries.lower_bound({&kernel, 0}), entries.upper_bound({&kernel, ~uint64_t{0}}),
        [](const auto& entry) { return entry.second != nullptr && entry.second->is_built(); }));
  }

 private:
  using Key = std::pair<const KernelInfo*, uint64_t>;
  using Entries = std::map<Key, std::shared_ptr<const Pipeline>>;

  static constexpr size_t kFewest = 16;  // custom kernels that are not worth a sweep

  Entries& of(const KernelInfo& kernel) { return kernel.code != nullptr ? custom_ : table_; }
  const Entries& of(const KernelInfo& kernel) const {
    return kernel.code != nullptr ? custom_ : table_;
  }

  // With the lock held; takes no memory. The next one comes when as many again were made as are
  // left, so that each costs a new pipeline little.
  void sweep(Entries& dropped) {
    for (auto at = custom_.begin(); at != custom_.end();) {
      const auto one = at++;
      if (one->first.first->code->handles.expired()) dropped.insert(custom_.extract(one));
    }
    sweep_at_ = std::max(kFewest, 2 * custom_.size());
  }

  mutable std::mutex mutex_;
  Entries table_;   // null: there is none
  Entries custom_;  // never null: a pipeline holds the code that its key points into
  size_t sweep_at_ = kFewest;
};

}  // namespace gyre
