#pragma once

#include <utility>

#include "bound.h"

namespace gyre::python {

// For K and V of each layer; None: none.
using LayerCodings = std::vector<std::pair<std::optional<KvCoding>, std::optional<KvCoding>>>;

inline KvCoding coding_or_none(const std::optional<KvCoding>& coding) {
  return coding.value_or(KvCoding{});
}

inline std::vector<KvLayerCoding> layer_codings(const LayerCodings& given) {
  std::vector<KvLayerCoding> made;
  for (const auto& [k, v] : given) made.push_back({coding_or_none(k), coding_or_none(v)});
  return made;
}

}  // namespace gyre::python
