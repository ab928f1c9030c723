#pragma once

#include "bound.h"

namespace gyre::python {

// What attend() writes over this layer. The call itself refuses other ranks and layers.
inline Dims attend_shape(const Tensor& q, const std::vector<KvLayer>& layers, uint64_t layer) {
  if (q.rank() != 3 || layer >= layers.size()) return {};
  const KvLayer& l = layers[layer];
  return {q.shape(0), q.shape(1), l.latent ? l.head_dim : l.v_head_dim};
}

}  // namespace gyre::python
