#pragma once
// A FLASH_ATTN_EXT node as a Problem.

#include "host.h"
#include "problem.h"

namespace gyre::ggml {

// Why the node must be left to ggml, or null, with `problem` filled in. `parameters` are the node's
// op_params. Without memory yet (data null) only shapes and types are judged.
const char* read_node(const Host& host, const abi::Tensor& node, Problem& problem);

}  // namespace gyre::ggml
