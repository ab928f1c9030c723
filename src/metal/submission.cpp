#include "metal/submission.h"

#include "runtime/process.h"

namespace gyre::metal {

Submission::~Submission() {
  // In a child of fork() the driver's objects are the parent's.
  if (commands_ != nullptr && stream_->process_ == process_generation())
    stream_->api_.commands_free(commands_);
}

void Submission::wait() {
  if (!is_finished()) {
    stream_->require_same_process();
    stream_->wait_for(*this);
  }
  throw_error();
}

bool Submission::done() const {
  if (is_finished()) return true;
  return stream_->process_ == process_generation() && stream_->api_.done(commands_);
}

}  // namespace gyre::metal
