#pragma once

#include <memory>
#include <utility>

#include "cuda/stream.h"
#include "runtime/queued_device.h"

namespace gyre::cuda {

// Work that has entered the stream, until its event has passed.
class Submission final : public QueuedWork {
 public:
  Submission(std::shared_ptr<Stream> stream, CuEvent event, Work work)
      : QueuedWork(std::move(work)), stream_(std::move(stream)), event_(event) {}
  ~Submission() override { stream_->give_event(event_); }

  void wait() override;
  bool done() const override;

  CuEvent event() const { return event_; }

 private:
  std::shared_ptr<Stream> stream_;
  CuEvent event_;
};

}  // namespace gyre::cuda
