#pragma once
// A small ggml in the test program: the functions that libggml-gyre.so looks up, a CPU device and
// graphs. Tests change it to resemble versions that the library does not know.

#include <atomic>
#include <string>
#include <vector>

#include "ggml/ggml_problem.h"
#include "integrations/ggml/ggml_abi.h"

namespace gyre::ggml::abi {
struct Graph {
  std::vector<Tensor*> nodes;
};
struct Buffer {
  bool is_host = true;
};
struct BufferType {
  bool is_host = true;
};
}  // namespace gyre::ggml::abi

namespace gyre::ggml::test {

constexpr int kOpAttention = 74, kOpCustom = 95;  // as in ggml 0.25
constexpr int kTypeIq4Nl = 20;

// What the functions of the fake return. reset_fake() restores a ggml that the library knows.
struct FakeGgml {
  std::string version = "0.25.3";
  size_t tensor_overhead = abi::kTensorOverhead;
  size_t q4_0_bytes = 18;
  const char* custom_name = "CUSTOM";
  bool has_cpu = true;
  bool moved_tables = false;  // two entries were inserted before graph_compute
  int threads = 2;            // of every backend of the CPU device
  bool fails = false;         // graph_compute fails after it has run
  int reference_calls = 0;

  abi::Registry registry{};
  abi::Device cpu{}, second_cpu{};
  bool is_second = false;    // another ggml of the process asks: its CPU device is second_cpu
  std::atomic<int> left{0};  // FLASH_ATTN_EXT nodes that reached the CPU backend
  std::atomic<int> backends{0};
  abi::Backend* moved = nullptr;  // made with moved_tables
};
FakeGgml& fake();
void reset_fake();

// A FLASH_ATTN_EXT node over the memory of a problem.
class Node {
 public:
  explicit Node(const Shape& shape);
  Node(const Node&) = delete;
  Node& operator=(const Node&) = delete;

  Memory memory;
  abi::Tensor q{}, k{}, v{}, mask{}, sinks{}, out{};
  abi::Graph graph;

  // The error against double precision; the output is NaN again afterwards.
  double error();
};

}  // namespace gyre::ggml::test
