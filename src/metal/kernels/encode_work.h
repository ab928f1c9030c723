#pragma once
// How the groups of kv_feedback and kv_transform are cut: plain functions of params, for kernels
// and for those who launch them.
#include "abi/kv_feedback.h"

namespace gyre {
namespace metal {

// kv_feedback: a group to a row, a simdgroup to a gain; four at least multiply with matrices.
constexpr uint32_t encode_simdgroups(uint32_t gains) { return gains < 4 ? 4 : gains; }
// Memory: four rows of floats, then two numbers of each gain.
constexpr uint32_t encode_bytes(uint32_t head_dim) { return 16 * head_dim + 64; }

// kv_transform: rows that share what is read of a matrix.
GYRE_CONSTANT uint32_t kTransformRows = 4;
GYRE_CONSTANT uint32_t kTransformThreads = 128;

}  // namespace metal
}  // namespace gyre
