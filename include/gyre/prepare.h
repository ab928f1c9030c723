#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "gyre/device.h"
#include "gyre/dtype.h"
#include "gyre/export.h"
#include "gyre/kv_cache.h"
#include "gyre/rope.h"

namespace gyre {

// What decides which kernels a model needs, for prepare().
struct ModelShape {
  uint64_t heads = 0;
  uint64_t kv_heads = 0;  // of the layers that give none; so are the next two
  uint64_t head_dim = 0;
  uint64_t v_head_dim = 0;                          // 0: head_dim
  std::vector<KvLayer> layers = {kDefaultKvLayer};  // those that are alike once, or all
  uint64_t context = 0;        // tokens of a sequence at most: KvCache's capacity, max_kv_length
  uint64_t step_tokens = 512;  // tokens of a sequence at most in one step
  DType dtype = DType::f16;    // of q, k and v
  std::optional<DType> out_dtype{};  // of attention's output; none: dtype
  // rope, or norm_rope, of q and k as they come, in every layer; none: the model has no rope.
  std::optional<RopeOptions> rope = RopeOptions{};
  bool norm = false;
  bool tree_mask = false;  // KvCache: AttentionMask::tree_mask will be given
  bool use_cache = true;   // KvCache
  bool use_batch = true;   // KvPool and KvBatch
  // kv_write and attention over pages that an engine owns, with and without is_prefill. Layers have
  // no tail and no sink tokens.
  bool use_pages = false;
  uint64_t page_tokens = 64;
  uint64_t max_sequences = 64;  // of one step: KvBatch's
};

struct PreparedKernel {
  std::string name{};     // as the compiler takes it
  bool compiled = false;  // false: it was in the kernel cache
  double seconds = 0;     // until it was there
};

// Kernels so far, and the one that came last.
struct PrepareProgress {
  uint64_t done = 0;
  uint64_t all = 0;
  const PreparedKernel& kernel;
};

using PrepareCallback = std::function<void(const PrepareProgress&)>;

// Builds all kernels that a model of this shape needs, several at a time, so that its first tokens
// wait for none. A shape that the model's calls would refuse is refused here. `progress` is called
// in this thread, after each kernel. Returns the kernels; on a CPU there is nothing to build and
// the list is empty.
GYRE_API std::vector<PreparedKernel> prepare(const Device& device, const ModelShape& shape,
                                             const PrepareCallback& progress = {});

}  // namespace gyre
