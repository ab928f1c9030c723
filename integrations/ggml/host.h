#pragma once
// The ggml that loaded this library: its functions, found by name, and its numbers, verified.

#include <string>

#include "ggml_abi.h"
#include "problem.h"

namespace gyre::ggml {

struct Host {
  int (*graph_n_nodes)(abi::Graph*) = nullptr;
  abi::Tensor* (*graph_node)(abi::Graph*, int) = nullptr;
  bool (*buft_is_host)(abi::BufferType*) = nullptr;
  bool (*buffer_is_host)(abi::Buffer*) = nullptr;

  abi::Device* cpu = nullptr;
  int op_attention = -1, op_custom = -1;
  int view_ops[5] = {};      // NONE, RESHAPE, VIEW, PERMUTE, TRANSPOSE
  int type[kRowTypes] = {};  // ggml's number of each row type
  std::string version;
};

// Finds and checks everything in the library that `caller`, an address within it, belongs to. Why
// this library must stand aside, or an empty string.
std::string find_host(const void* caller, Host& host);

// For get_proc_address: null if the CPU backend has no such function.
void* cpu_function(const Host& host, const char* name);

// One line on stderr, where llama.cpp's own log goes.
void say(const std::string& text);

}  // namespace gyre::ggml
