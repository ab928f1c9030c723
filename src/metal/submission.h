#pragma once

#include <memory>
#include <utility>

#include "metal/stream.h"
#include "runtime/queued_device.h"

namespace gyre::metal {

// A list that was committed.
class Submission final : public QueuedWork {
 public:
  Submission(std::shared_ptr<Stream> stream, Work work)
      : QueuedWork(std::move(work)), stream_(std::move(stream)) {}
  ~Submission() override;

  void wait() override;
  bool done() const override;

  void set_commands(Commands* commands) { commands_ = commands; }
  Commands* commands() const { return commands_; }

 private:
  std::shared_ptr<Stream> stream_;
  Commands* commands_ = nullptr;
};

}  // namespace gyre::metal
