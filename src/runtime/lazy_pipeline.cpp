#include "runtime/lazy_pipeline.h"

#include <exception>
#include <new>
#include <utility>

#include "runtime/require.h"

namespace gyre {
namespace {

// What was caught, without memory for a message if need be.
Error caught_error() noexcept {
  try {
    try {
      throw;
    } catch (const Error&) {
      throw;
    } catch (const std::bad_alloc&) {
      out_of_memory("kernel");
    } catch (const std::exception& caught) {
      fail(ErrorCode::io, caught.what());
    }
  } catch (const Error& error) {
    return error;
  }
}

}  // namespace

void LazyPipeline::build() const noexcept {
  std::unique_lock lock(mutex_);
  if (state_ == State::idle) build(lock);
}

void LazyPipeline::wait() const {
  std::unique_lock lock(mutex_);
  if (state_ == State::idle) build(lock);
  done_.wait(lock, [this] { return state_ != State::building; });
  if (!error_) return;
  const Error error = *error_;
  if (error.code() != ErrorCode::compile_failed) state_ = State::idle;
  throw error;
}

void LazyPipeline::build(std::unique_lock<std::mutex>& lock) const {
  state_ = State::building;
  error_.reset();
  lock.unlock();
  std::optional<Error> error;
  try {
    load();
  } catch (...) {
    error = caught_error();
  }
  lock.lock();
  error_ = std::move(error);
  state_ = State::done;
  set_built(!error_);
  done_.notify_all();
}

}  // namespace gyre
