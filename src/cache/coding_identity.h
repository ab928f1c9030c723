#pragma once
// Which calibration a cache's bytes were written with.

#include <span>
#include <vector>

#include "gyre/kv_cache.h"

namespace gyre {

// Geometry that codings of K and V have to fit.
struct CodedGeometry {
  uint64_t kv_heads, head_dim, v_head_dim;
};

// Refuses codings that do not fit the layers: none at all, or one for each layer. `op` opens the
// messages.
void check_layer_codings(const char* op, const CodedGeometry& geometry,
                         const std::vector<KvLayer>& layers,
                         const std::vector<KvLayerCoding>& codings);

// Which layer a message is about.
struct CodedLayer {
  const char* op;
  uint64_t index;
};

// A checksum of the numbers of a layer's coding; 0: it has none. Reads device memory, and refuses
// an inverse that is none.
uint64_t coding_checksum(const CodedLayer& layer, const KvLayerCoding& coding);
// One number for all layers, in 32 bits; 0: none has a coding.
uint32_t coding_identity(std::span<const uint64_t> checksums);

}  // namespace gyre
