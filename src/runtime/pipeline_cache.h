#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>

#include "gyre/error.h"
#include "runtime/command_list.h"

namespace gyre {

// One per device. A pipeline is built once and stays where it is until the device goes, so pointers
// handed out remain valid. A "no" is remembered as well: that there is no such kernel, or that it
// does not compile, which is thrown again. Other failures may pass (memory was short): asking again
// builds again.
class PipelineCache {
 public:
  // make() returns std::unique_ptr<Pipeline>, null if the device has no such kernel.
  template <class Make>
  const Pipeline* find_or_make(const KernelInfo& kernel, uint64_t spec, const Make& make) {
    const std::lock_guard lock(mutex_);
    const Key key{&kernel, spec};
    auto found = entries_.find(key);
    if (found == entries_.end()) found = entries_.emplace(key, built(make)).first;
    if (found->second.error) throw Error(*found->second.error);
    return found->second.pipeline.get();
  }

  uint32_t count(const KernelInfo& kernel) const {
    const std::lock_guard lock(mutex_);
    return static_cast<uint32_t>(std::count_if(
        entries_.lower_bound({&kernel, 0}), entries_.upper_bound({&kernel, ~uint64_t{0}}),
        [](const auto& entry) { return entry.second.pipeline != nullptr; }));
  }

 private:
  using Key = std::pair<const KernelInfo*, uint64_t>;
  struct Entry {
    std::unique_ptr<Pipeline> pipeline;  // null: there is none
    std::optional<Error> error;          // compile_failed
  };

  template <class Make>
  static Entry built(const Make& make) {
    try {
      return {make(), std::nullopt};
    } catch (const Error& error) {
      if (error.code() != ErrorCode::compile_failed) throw;
      return {nullptr, error};
    }
  }

  mutable std::mutex mutex_;
  std::map<Key, Entry> entries_;
};

}  // namespace gyre
