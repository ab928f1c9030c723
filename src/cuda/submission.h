#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <vector>

#include "cuda/stream.h"

namespace gyre::cuda {

// Work that has entered the stream, until its event has passed. Knows its commands by name, in case
// it fails, and holds what must outlive it.
class Submission final : public FenceState {
 public:
  struct Work {
    const CommandList* list = nullptr;  // of a graph that `keep` holds; else `eager`
    CommandList eager;                  // without args
    std::shared_ptr<const void> keep;
  };

  Submission(std::shared_ptr<Stream> stream, CuEvent event, Work work)
      : stream_(std::move(stream)), event_(event), work_(std::move(work)) {}
  ~Submission() override { stream_->give_event(event_); }

  void wait() override;
  bool done() const override;

  CuEvent event() const { return event_; }
  const CommandList& list() const { return work_.list != nullptr ? *work_.list : work_.eager; }
  // The stream no longer lists it. Lets go of what it held, which may run code of the owners: call
  // it without a lock.
  void finish();
  void fail_with(const Error& error) noexcept;

 private:
  std::shared_ptr<Stream> stream_;
  CuEvent event_;
  Work work_;
  std::atomic<bool> finished_{false};
  std::optional<Error> error_;  // written before finished_
};

}  // namespace gyre::cuda
