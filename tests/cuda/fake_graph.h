#pragma once
// Kernels and graphs of the fake driver. Nodes of a graph run in the order in which they were added
// only as far as its edges say so.

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "abi/bytes_copy.h"
#include "cuda/driver.h"
#include "cuda/kernel.h"
#include "cuda_host/host_kernels.h"
#include "fake_streams.h"

namespace gyre::test {

using namespace gyre::cuda;

struct Function {
  std::string name;
  const cuda_host::HostKernel* host = nullptr;  // null: it does nothing
  FakeMoment used{};                            // until then

  // Threads of a block. Kernels called "narrow" have many registers.
  int max_threads() const { return name.find("narrow") == std::string::npos ? 1024 : 64; }
};
struct Module {
  std::vector<std::unique_ptr<Function>> functions;
};
struct Node {
  Function* function;  // null: no kernel, it does nothing
  abi::BytesCopyParams params;
  EarlyArgs args;
  cuda_host::HostShape shape;
  std::vector<std::vector<std::byte>> host_params = {};
  std::vector<size_t> after = {};  // nodes of the graph
  bool programmatic = false;       // may begin before the one it follows has ended
};
struct Graph {
  std::vector<Node> nodes;

  // Behind all others.
  void add(Node node) {
    if (!nodes.empty()) node.after.push_back(nodes.size() - 1);
    nodes.push_back(std::move(node));
  }
};

inline Node make_node(CuFunction function, const cuda_host::HostShape& shape, void** params) {
  Node node{reinterpret_cast<Function*>(function), {}, {}, shape};
  if (const cuda_host::HostKernel* const host = node.function->host; host != nullptr) {
    for (uint32_t i = 0; i < host->params; ++i) {
      const auto* const from = static_cast<const std::byte*>(params[i]);
      node.host_params.emplace_back(from, from + host->param_bytes[i]);
    }
    return node;
  }
  if (node.function->name.find("bytes_copy") == std::string::npos) return node;
  std::memcpy(&node.params, params[0], sizeof node.params);
  std::memcpy(&node.args, params[1], sizeof node.args);
  return node;
}

// Handles of nodes count from 1.
inline size_t place_of(CuGraphNode node) { return reinterpret_cast<size_t>(node) - 1; }

// The node that begins before node i: it reads early and follows by a programmatic edge. Null:
// none.
inline size_t early_follower(const Graph& graph, size_t i) {
  for (size_t next = i + 1; next < graph.nodes.size(); ++next) {
    const Node& node = graph.nodes[next];
    if (node.function == nullptr) continue;
    const cuda_host::HostKernel* const host = node.function->host;
    if (node.programmatic && node.after == std::vector{i} && host != nullptr && host->reads_early)
      return next;
  }
  return 0;
}

// The last one that can run comes first. run(node, node ahead that waits for it, or null).
template <class Run>
CuResult run_graph(const Graph& graph, const Run& run) {
  std::vector<bool> done(graph.nodes.size());
  const auto is_done = [&](size_t i) { return done[i]; };
  for (size_t count = 0; count < graph.nodes.size(); ++count) {
    size_t i = graph.nodes.size() - 1;
    while (done[i] || !std::ranges::all_of(graph.nodes[i].after, is_done)) --i;
    const size_t next = early_follower(graph, i);
    const CuResult result =
        next != 0 ? run(graph.nodes[next], &graph.nodes[i]) : run(graph.nodes[i], nullptr);
    if (result != kCuSuccess) return result;
    done[i] = true;
    if (next != 0) done[next] = true, ++count;
  }
  return kCuSuccess;
}

}  // namespace gyre::test
