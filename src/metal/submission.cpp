#include "metal/submission.h"

#include "runtime/process.h"
#include "runtime/require.h"

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
  if (!error_.empty()) fail(ErrorCode::device_lost, error_);
}

bool Submission::done() const {
  if (is_finished()) return true;
  return stream_->process_ == process_generation() && stream_->api_.done(commands_);
}

void Submission::fail_with(const std::string& error) {
  if (is_finished()) return;
  error_ = error;
  set_finished();
}

}  // namespace gyre::metal
