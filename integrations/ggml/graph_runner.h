#pragma once
// Computes graphs with ggml's CPU backend, its FLASH_ATTN_EXT nodes with Gyre's attention: for the
// time of the call they are CUSTOM nodes, so that ggml's own threads run them where they stand.

#include <array>
#include <atomic>
#include <cstdlib>
#include <memory>
#include <optional>
#include <vector>

#include "attention.h"
#include "host.h"

namespace gyre::ggml {

// 64-byte aligned floats that only grow.
class FloatBuffer {
 public:
  FloatBuffer() = default;
  FloatBuffer(const FloatBuffer&) = delete;
  FloatBuffer& operator=(const FloatBuffer&) = delete;
  ~FloatBuffer() { std::free(memory_); }

  float* get(uint64_t floats);  // null: there is no memory

 private:
  float* memory_ = nullptr;
  uint64_t floats_ = 0;
};

// Belongs to one backend, which computes one graph at a time.
class GraphRunner {
 public:
  explicit GraphRunner(const Host& host) : host_(host) {}
  ~GraphRunner();
  GraphRunner(const GraphRunner&) = delete;
  GraphRunner& operator=(const GraphRunner&) = delete;

  // `compute` is the CPU backend's own.
  abi::Status run(abi::Backend* cpu, abi::ComputeGraph compute, abi::Graph* graph);

 private:
  static constexpr size_t kMaxThreads = 512;  // ggml's

  struct Work {
    GraphRunner* runner;
    abi::Tensor* node;
    int32_t parameters[abi::kOpParamBytes / 4];
    Problem problem;
    std::optional<Plan> plan;
    std::optional<Call> call;
  };

  void collect(abi::Graph* graph);
  bool prepare_memory();
  void replace_nodes();
  void restore_nodes();
  static void run_node(abi::Tensor* node, int thread, int threads, void* data);

  const Host& host_;
  std::vector<std::unique_ptr<Work>> work_;
  size_t used_ = 0;  // of work_, by this graph
  FloatBuffer partials_;
  std::array<FloatBuffer, kMaxThreads> scratch_;
  uint64_t computed_ = 0, left_ = 0;
  const char* why_left_ = nullptr;
};

// GYRE_GGML_VERBOSE=1
bool is_verbose();

}  // namespace gyre::ggml
