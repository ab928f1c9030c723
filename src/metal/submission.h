#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <utility>

#include "metal/stream.h"

namespace gyre::metal {

// A list that was committed, until it is known to be done. Knows its commands by name, in case it
// fails, and holds what must outlive it.
class Submission final : public FenceState {
 public:
  struct Work {
    const CommandList* list = nullptr;  // of a graph that `keep` holds; else `eager`
    CommandList eager;                  // without args
    std::shared_ptr<const void> keep;
  };

  Submission(std::shared_ptr<Stream> stream, Work work)
      : stream_(std::move(stream)), work_(std::move(work)) {}
  ~Submission() override;

  void wait() override;
  bool done() const override;

  void set_commands(Commands* commands) { commands_ = commands; }
  Commands* commands() const { return commands_; }
  const CommandList& list() const { return work_.list != nullptr ? *work_.list : work_.eager; }
  bool is_finished() const { return finished_.load(std::memory_order_acquire); }
  void set_finished() { finished_.store(true, std::memory_order_release); }
  void fail_with(const std::string& error);  // unless it has finished
  // Lets go of what it held, which may run code of the owners: call it without a lock.
  void let_go() { work_ = {}; }

 private:
  std::shared_ptr<Stream> stream_;
  Work work_;
  Commands* commands_ = nullptr;
  std::atomic<bool> finished_{false};
  std::string error_;  // written before finished_, under the stream's lock
};

}  // namespace gyre::metal
