#include "cuda/submission.h"

namespace gyre::cuda {

void Submission::wait() {
  if (!is_finished()) {
    stream_->context().require_same_process();
    const Current current(stream_->context());
    stream_->check(stream_->api_.event_synchronize(event_), "cuEventSynchronize");
    stream_->retire();
  }
  throw_error();
}

bool Submission::done() const {
  if (is_finished()) return true;
  if (stream_->context().is_inherited()) return false;
  const Current current(stream_->context());
  return stream_->api_.event_query(event_) != kCuNotReady;
}

}  // namespace gyre::cuda
