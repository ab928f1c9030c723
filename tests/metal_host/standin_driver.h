#pragma once
// A Metal driver over host memory. It runs kernels that were registered as host kernels
// (host_kernel.h), on a thread for each queue, after commit(): what lies between two barriers in
// random order. What Metal refuses becomes the error of the command buffer, which is not run.

#include <cstdint>
#include <string>
#include <vector>

#include "metal/driver.h"

namespace gyre::metal_host {

const metal::Driver& standin_driver();

// What it was asked for so far, and what it still holds.
struct StandinCounts {
  uint64_t buffers = 0, queues = 0, libraries = 0, pipelines = 0, commands = 0;  // that live
  uint64_t compiled = 0, committed = 0, dispatches = 0, barriers = 0;            // ever
};
StandinCounts standin_counts();

// Things that no command buffer can be blamed for, such as a buffer freed while work uses it. Once
// there is one, every later command buffer fails with it.
std::vector<std::string> standin_violations();
void clear_standin_violations();

// For tests of failures. A count is how many calls succeed before the one that fails; that one is
// the last to fail.
void fail_buffer_after(uint64_t calls);   // buffer_make and buffer_wrap
void set_standin_memory(uint64_t bytes);  // that further buffers may take
void fail_begin_after(uint64_t calls);
void fail_commit_after(uint64_t calls, const std::string& error);
void fail_compile(const std::string& log);  // of every library until it is empty
void set_standin_reason(const std::string& reason);
void set_standin_max_threads(uint32_t threads);  // of pipelines made from now on

// Nothing that is committed begins while it lives.
class HoldQueues {
 public:
  HoldQueues();
  HoldQueues(const HoldQueues&) = delete;
  HoldQueues& operator=(const HoldQueues&) = delete;
  ~HoldQueues();
};

}  // namespace gyre::metal_host
