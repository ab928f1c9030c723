#pragma once

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>

#include "gyre/error.h"
#include "runtime/command_list.h"

namespace gyre {

// A pipeline that takes long to make. Whoever asks first builds it, a thread of the device's or one
// that waits for it; others wait. That it does not compile is remembered. Other failures may pass
// (memory was short): who asks again builds again.
class LazyPipeline : public Pipeline {
 public:
  LazyPipeline(const KernelInfo& info, uint64_t key) : Pipeline(info, key) { set_built(false); }

  void build() const noexcept;  // unless somebody does or did

 private:
  enum class State : uint8_t { idle, building, done };

  // Makes it, or throws why it cannot be. By one thread at a time.
  virtual void load() const = 0;

  void wait() const override;
  void build(std::unique_lock<std::mutex>& lock) const;

  // Pipelines are handed out as const: building one is not a change to see.
  mutable std::mutex mutex_;
  mutable std::condition_variable done_;
  mutable State state_ = State::idle;
  mutable std::optional<Error> error_;
};

// For a queue. A pipeline that nobody needs by then is not built, and not kept for it.
inline std::function<void()> build_job(const std::weak_ptr<const LazyPipeline>& pipeline) {
  return [pipeline] {
    if (const std::shared_ptr<const LazyPipeline> wanted = pipeline.lock()) wanted->build();
  };
}

}  // namespace gyre
