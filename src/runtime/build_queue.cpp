#include "runtime/build_queue.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "runtime/cpu_quota.h"
#include "runtime/require.h"

namespace gyre {

uint32_t BuildQueue::usable_threads() {
  constexpr uint32_t kMax = 16;  // a model has few kernels; a compilation takes about 100 MB
  return std::clamp<uint32_t>(usable_cores(), 1, kMax);
}

BuildQueue::BuildQueue(uint32_t max_threads) : max_threads_(std::max(max_threads, 1u)) {}

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
    if (jobs_.size() > idle_ && threads_.size() < max_threads_) add_thread();
  }
  wake_.notify_one();
}

// With the lock held and a new job at the end, which is dropped if nobody is there to run it.
void BuildQueue::add_thread() {
  try {
    threads_.emplace_back([this] { work(); });
  } catch (const std::exception& error) {  // no thread, or no memory for one
    if (!threads_.empty()) return;
    jobs_.pop_back();
    fail(ErrorCode::out_of_memory, "a thread could not be started: ", error.what());
  }
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
  std::vector<size_t> news;
  news.reserve(jobs.size());  // workers take no memory
  std::exception_ptr thrown;
  size_t added = 0;
  try {
    for (; added < jobs.size(); ++added) {
      add([&, i = added] {
        jobs[i]();
        // Told under the lock: after it the caller may be gone, and `ended` with it.
        const std::lock_guard lock(mutex);
        news.push_back(i);
        ended.notify_one();
      });
    }
  } catch (...) {  // those that were added are waited for
    thrown = std::current_exception();
  }
  for (size_t count = 0; count < added; ++count) {
    std::unique_lock lock(mutex);
    ended.wait(lock, [&] { return news.size() > count; });
    const size_t index = news[count];
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
