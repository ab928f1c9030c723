#pragma once
// How the fake driver runs a kernel. In one file of a library, as fake_state.h.

#include <cstring>
#include <exception>
#include <functional>
#include <iterator>
#include <mutex>

#include "fake_graph.h"
#include "fake_state.h"

namespace {

bool is_inside(CuAddress address, size_t bytes) {
  const auto after = blocks.upper_bound(address);
  if (after == blocks.begin()) return false;
  const auto& [begin, size] = *std::prev(after);
  return address - begin < size && bytes <= size - (address - begin);
}

// Errors show later, as on a GPU.
void run_on_host(const Node& node, const std::function<void()>& ahead) {
  const gyre::cuda_host::HostKernel& kernel = *node.function->host;
  const void* params[3] = {};
  for (uint32_t i = 0; i < kernel.params; ++i) params[i] = node.host_params[i].data();
  ++launches[node.function->name];
  try {
    kernel.run(node.shape, kernel.cluster(), params, ahead);
  } catch (const std::exception& error) {
    sticky = kCuLaunchFailed;
    kernel_error = node.function->name + ": " + error.what();
  }
}

// `ahead` has not run yet and does while this one waits for it; null: it has.
CuResult run(const Node& node, const Node* ahead, const FakeMoment& until) {
  const std::lock_guard lock(mutex);
  if (sticky != kCuSuccess || node.function == nullptr) return sticky;
  ++kernels_run;
  node.function->used = until;
  if (node.function->host != nullptr) {
    if (ahead != nullptr) ++kernels_run, ahead->function->used = until;
    std::function<void()> before;
    if (ahead != nullptr) before = [ahead] { run_on_host(*ahead, {}); };
    run_on_host(node, before);
    return kCuSuccess;
  }
  if (node.function->name.find("bytes_copy") == std::string::npos) return kCuSuccess;
  const CuAddress from = node.args.at[0], to = node.args.at[1];
  if (!is_inside(from, node.params.bytes) || !is_inside(to, node.params.bytes)) {
    sticky = kCuIllegalAddress;
    return kCuSuccess;  // it shows later
  }
  std::memmove(reinterpret_cast<void*>(to), reinterpret_cast<void*>(from), node.params.bytes);
  return kCuSuccess;
}

}  // namespace
