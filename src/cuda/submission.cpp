#include "cuda/submission.h"

namespace gyre::cuda {

void Submission::wait() {
  if (!finished_.load(std::memory_order_acquire)) {
    stream_->context().require_same_process();
    const Current current(stream_->context());
    stream_->check(stream_->api_.event_synchronize(event_), "cuEventSynchronize");
    stream_->retire();
  }
  if (finished_.load(std::memory_order_acquire) && error_) throw Error(*error_);
}

bool Submission::done() const {
  if (finished_.load(std::memory_order_acquire)) return true;
  if (stream_->context().is_inherited()) return false;
  const Current current(stream_->context());
  return stream_->api_.event_query(event_) != kCuNotReady;
}

void Submission::finish() {
  finished_.store(true, std::memory_order_release);
  work_ = {};
}

void Submission::fail_with(const Error& error) noexcept {
  if (finished_.load(std::memory_order_acquire)) return;
  error_ = error;
  finished_.store(true, std::memory_order_release);
}

}  // namespace gyre::cuda
