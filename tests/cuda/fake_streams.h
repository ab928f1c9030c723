#pragma once
// What streams of the fake driver were given, and how much of it somebody has seen to be done: by a
// wait for a stream, or for an event that was recorded after it. Work runs at once; whoever lets go
// of its memory before it was seen to be done would be wrong on a GPU.

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace gyre::test {

class FakeLine;

struct FakeMoment {
  std::shared_ptr<FakeLine> line = nullptr;  // null: always done
  size_t step = 0;
};

class FakeLine : public std::enable_shared_from_this<FakeLine> {
 public:
  FakeLine() { steps_.reserve(kRoom); }

  static std::atomic<uint64_t>& unseen() {  // work, of all lines
    static std::atomic<uint64_t> count{0};
    return count;
  }

  void add_work() {
    const std::lock_guard lock(mutex());
    add({});
    ++unseen();
  }
  void add_wait(const FakeMoment& moment) {
    const std::lock_guard lock(mutex());
    if (moment.line != nullptr) add(moment);
  }
  FakeMoment now() {
    const std::lock_guard lock(mutex());
    return {shared_from_this(), first_ + steps_.size()};
  }
  static void see(const FakeMoment& moment) {
    const std::lock_guard lock(mutex());
    if (moment.line != nullptr) moment.line->see_until(moment.step);
  }
  static bool is_seen(const FakeMoment& moment) {
    const std::lock_guard lock(mutex());
    return moment.line == nullptr || moment.line->seen_ >= moment.step;
  }

 private:
  static constexpr size_t kRoom =
      256;  // as in a driver, a launch takes memory only where many wait

  static std::mutex& mutex() {
    static std::mutex one;
    return one;
  }
  void add(const FakeMoment& moment) {
    if (seen_ == first_ + steps_.size()) {
      first_ = seen_;
      steps_.clear();
    }
    steps_.push_back(moment);
  }
  void see_until(size_t step) {
    while (seen_ < step) {
      const FakeMoment done = std::exchange(steps_[seen_++ - first_], {});
      if (done.line != nullptr) {
        done.line->see_until(done.step);
      } else {
        --unseen();
      }
    }
  }

  std::vector<FakeMoment> steps_;  // work has no line
  size_t first_ = 0, seen_ = 0;    // numbers of the first of steps_, and of the next to see
};

}  // namespace gyre::test
