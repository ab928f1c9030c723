#pragma once

#include <cstddef>
#include <thread>
#include <vector>

namespace gyre::test {

// Runs work(0) to work(count - 1) at the same time.
template <class Work>
void in_threads(size_t count, const Work& work) {
  std::vector<std::thread> threads;
  for (size_t i = 0; i < count; ++i) threads.emplace_back(work, i);
  for (std::thread& thread : threads) thread.join();
}

}  // namespace gyre::test
