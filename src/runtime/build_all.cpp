#include "runtime/build_all.h"

#include <chrono>
#include <exception>

namespace gyre {
namespace {

struct Outcome {
  bool was_there = false;
  double seconds = 0;
  std::exception_ptr error{};
};

Outcome make(const BuildTask& task) noexcept {
  const auto begin = std::chrono::steady_clock::now();
  Outcome outcome;
  try {
    outcome.was_there = task.make();
  } catch (...) {
    outcome.error = std::current_exception();
  }
  outcome.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  return outcome;
}

}  // namespace

void build_all(BuildQueue& queue, const std::vector<BuildTask>& tasks, const BuildCallback& built) {
  std::vector<Outcome> outcomes(tasks.size());
  std::vector<BuildQueue::Job> jobs;
  for (size_t i = 0; i < tasks.size(); ++i)
    jobs.emplace_back([&, i] { outcomes[i] = make(tasks[i]); });
  uint64_t done = 0;
  queue.run_all(jobs, [&](size_t i) {
    const Outcome& one = outcomes[i];
    if (one.error == nullptr)
      built({tasks[i].name, !one.was_there, one.seconds, ++done, tasks.size()});
  });
  for (const Outcome& one : outcomes) {
    if (one.error != nullptr) std::rethrow_exception(one.error);
  }
}

}  // namespace gyre
