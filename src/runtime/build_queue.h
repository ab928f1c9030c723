#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

namespace gyre {

// Runs jobs that take seconds, several at a time, on threads that come with the first jobs and stay
// until the queue goes. Thread-safe; a job must not throw.
class BuildQueue {
 public:
  using Job = std::function<void()>;

  explicit BuildQueue(uint32_t max_threads = usable_threads());
  BuildQueue(const BuildQueue&) = delete;
  BuildQueue& operator=(const BuildQueue&) = delete;
  ~BuildQueue();  // jobs that have not begun are dropped, those that have are waited for

  static uint32_t usable_threads();

  void add(Job job);
  // Returns when all are done. `done` gets each job's index in the order in which they end, in the
  // caller's thread; what it throws is thrown after the last job.
  void run_all(std::span<const Job> jobs, const std::function<void(size_t)>& done);

 private:
  void add_thread();
  void work();

  const uint32_t max_threads_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<Job> jobs_;
  std::vector<std::thread> threads_;
  uint32_t idle_ = 0;
  bool ends_ = false;
};

}  // namespace gyre
