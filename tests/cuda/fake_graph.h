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
#include "fake_streams.h"

namespace gyre::test {

using namespace gyre::cuda;

struct Function {
  std::string name;
  FakeMoment used{};  // until then

  // Threads of a block. Kernels called "narrow" have many registers.
  int max_threads() const { return name.find("narrow") == std::string::npos ? 1024 : 64; }
};
struct Module {
  std::vector<std::unique_ptr<Function>> functions;
};
struct Node {
  Function* function;
  abi::BytesCopyParams params;
  EarlyArgs args;
  std::vector<size_t> after = {};  // nodes of the graph
};
struct Graph {
  std::vector<Node> nodes;
};

inline Node make_node(CuFunction function, void** params) {
  Node node{reinterpret_cast<Function*>(function), {}, {}, {}};
  if (node.function->name.find("bytes_copy") == std::string::npos) return node;
  std::memcpy(&node.params, params[0], sizeof node.params);
  std::memcpy(&node.args, params[1], sizeof node.args);
  return node;
}

// Handles of nodes count from 1.
inline size_t place_of(CuGraphNode node) { return reinterpret_cast<size_t>(node) - 1; }

// The last one that can run comes first.
template <class Run>
CuResult run_graph(const Graph& graph, const Run& run) {
  std::vector<bool> done(graph.nodes.size());
  const auto is_done = [&](size_t i) { return done[i]; };
  for (size_t count = 0; count < graph.nodes.size(); ++count) {
    size_t i = graph.nodes.size() - 1;
    while (done[i] || !std::ranges::all_of(graph.nodes[i].after, is_done)) --i;
    if (const CuResult result = run(graph.nodes[i]); result != kCuSuccess) return result;
    done[i] = true;
  }
  return kCuSuccess;
}

}  // namespace gyre::test
