#pragma once
// The two ways into llama.cpp.

#include "host.h"

namespace gyre::ggml {

// The way that ggml documents: an accelerator device that shares the CPU's memory. The scheduler
// gives it the attention nodes.
abi::Device* accelerator_device(const Host& host, abi::Registry* registry);
void* accelerator_function(const char* name);

// Every backend that the CPU device makes from now on computes attention here, in the graphs as
// they are. Changes ggml's CPU device in memory.
void wrap_cpu_device(const Host& host);

}  // namespace gyre::ggml
