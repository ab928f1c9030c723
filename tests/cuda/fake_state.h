#pragma once
// What the fake driver knows of itself, and what tests ask it by dlsym(). In one file of a library.

#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "cuda/driver.h"
#include "cuda/kernel.h"
#include "cuda_host/host_kernels.h"
#include "fake_streams.h"

namespace {

using namespace gyre::cuda;
using namespace gyre::test;

std::mutex mutex;
std::map<CuAddress, size_t> blocks;
CuResult sticky = kCuSuccess;  // until the last user lets go of the context
int users = 0;
uint64_t kernels_run = 0;
int64_t modules = 0;                       // that are loaded
uint64_t early_unloads = 0;                // of kernels in work that nobody had waited for
std::vector<uint32_t> early_args;          // of the nodes of the graph that was instantiated last
uint32_t overlaps = 0;                     // a bit for each launch onto a stream, the last lowest
std::map<std::string, uint64_t> launches;  // of emulated kernels, by name
std::string kernel_error;                  // what the first that failed did

// With kernels it is an H200, else a small one of its kind; GYRE_FAKE_GPU=<multiprocessors> gives
// it the shared memory of an H200.
CudaLimits default_limits() {
  const char* const count = std::getenv("GYRE_FAKE_GPU");
  if (count == nullptr && !gyre::cuda_host::has_host_kernels()) return {4, 1 << 17, 1 << 17, 90};
  return {count != nullptr ? static_cast<uint32_t>(std::atoi(count)) : 132, 227 << 10, 228 << 10,
          90};
}
std::optional<CudaLimits> wanted_limits;  // by a test

// A child of fork() cannot use what its parent has of the driver.
pid_t user = 0;
void require_user() {
  if (user != getpid()) std::abort();
}

// Calls that a driver out of memory, or a lost GPU, would refuse; which of them fail, and how.
struct Faults {
  uint64_t calls = 0, first = 0, count = 0;
  CuResult result = kCuSuccess;
};
Faults faults;
std::atomic<CuResult> wait_fault{kCuSuccess};  // of the next wait for an event

CuResult fault() {
  const std::lock_guard lock(mutex);
  const uint64_t call = ++faults.calls;
  if (call < faults.first || call - faults.first >= faults.count) return kCuSuccess;
  if (faults.result != kCuOutOfMemory && faults.result != kCuInvalidValue) sticky = faults.result;
  return faults.result;
}

}  // namespace

// For tests, by dlsym(): so many calls, from the n-th from now on, fail; how many there were since.
extern "C" void gyre_fake_cuda_fail(uint64_t nth, uint64_t count, CuResult result) {
  const std::lock_guard lock(mutex);
  faults = {0, nth, count, result};
}
extern "C" void gyre_fake_cuda_fail_wait(CuResult result) { wait_fault = result; }
// A kernel has failed, which nobody knows yet.
extern "C" void gyre_fake_cuda_break(CuResult result) {
  const std::lock_guard lock(mutex);
  sticky = result;
}
extern "C" uint64_t gyre_fake_cuda_kernels_run() {
  const std::lock_guard lock(mutex);
  return kernels_run;
}
extern "C" uint64_t gyre_fake_cuda_unseen() { return FakeLine::unseen(); }
extern "C" int64_t gyre_fake_cuda_modules() {
  const std::lock_guard lock(mutex);
  return modules;
}
extern "C" uint64_t gyre_fake_cuda_early_unloads() {
  const std::lock_guard lock(mutex);
  return early_unloads;
}
extern "C" uint32_t gyre_fake_cuda_early_args(uint64_t node) {
  const std::lock_guard lock(mutex);
  return early_args.at(node);
}
extern "C" uint32_t gyre_fake_cuda_overlaps() {
  const std::lock_guard lock(mutex);
  return overlaps;
}
extern "C" uint64_t gyre_fake_cuda_calls() {
  const std::lock_guard lock(mutex);
  return faults.calls;
}
// For devices that are opened from now on.
extern "C" void gyre_fake_cuda_limits(const CudaLimits* wanted) {
  const std::lock_guard lock(mutex);
  wanted_limits = wanted != nullptr ? std::optional(*wanted) : std::nullopt;
}
extern "C" bool gyre_fake_cuda_has_kernel(const char* name) {
  return gyre::cuda_host::find_host_kernel(name) != nullptr;
}
// Emulated kernels whose name begins like that.
extern "C" uint64_t gyre_fake_cuda_launches(const char* name) {
  const std::lock_guard lock(mutex);
  uint64_t count = 0;
  for (auto at = launches.lower_bound(name); at != launches.end() && at->first.starts_with(name);
       ++at)
    count += at->second;
  return count;
}
extern "C" void gyre_fake_cuda_own(CuAddress address, uint64_t bytes) {
  const std::lock_guard lock(mutex);
  blocks[address] = bytes;
}
