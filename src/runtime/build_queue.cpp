#include "runtime/build_queue.h"

#include <algorithm>
#include <exception>
#include <utility>

namespace gyre {

uint32_t BuildQueue::usable_threads() {
  constexpr uint32_t kMost = 16;  // a model has few kernels; a compilation takes about 100 MB
  return std::clamp<uint32_t>(std::thread::hardware_concurrency(), 1, kMost);
}

BuildQueue::BuildQueue(uint32_t most_threads) : most_threads_(std::max(most_threads, 1u)) {}

BuildQueue::~BuildQueue() {
  {
    const std::lock_guard lock(mutex_);
    ends_ = true;
    jobs_.clear();
  }
  wake_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void BuildQueue::add(Job job) {
  {
    const std::lock_guard lock(mutex_);
    jobs_.push_back(std::move(job));
    if (jobs_.size() > idle_ && threads_.size() < most_threads_)
      threads_.emplace_back([this] { work(); });
  }
  wake_.notify_one();
}

void BuildQueue::work() {
  std::unique_lock lock(mutex_);
  for (;;) {
    ++idle_;
    wake_.wait(lock, [this] { return ends_ || !jobs_.empty(); });
    --idle_;
    if (ends_) return;
    const Job job = std::move(jobs_.front());
    jobs_.pop_front();
    lock.unlock();
    job();
    lock.lock();
  }
}

void BuildQueue::run_all(std::span<const Job> jobs, const std::function<void(size_t)>& done) {
  std::mutex mutex;
  std::condition_variable ended;
  std::deque<size_t> news;
  for (size_t i = 0; i < jobs.size(); ++i) {
    add([&, i] {
      jobs[i]();
      // Told under the lock: after it the caller may be gone, and `ended` with it.
      const std::lock_guard lock(mutex);
      news.push_back(i);
      ended.notify_one();
    });
  }
  std::exception_ptr thrown;
  for (size_t count = 0; count < jobs.size(); ++count) {
    std::unique_lock lock(mutex);
    ended.wait(lock, [&] { return !news.empty(); });
    const size_t index = news.front();
    news.pop_front();
    lock.unlock();
    try {
      if (thrown == nullptr) done(index);
    } catch (...) {
      thrown = std::current_exception();
    }
  }
  if (thrown != nullptr) std::rethrow_exception(thrown);
}

}  // namespace gyre
