#pragma once

#include <utility>

#include "bound.h"

namespace gyre::python {

// For K and V of each layer; None: none.
using LayerCalibrations =
    std::vector<std::pair<std::optional<KvCalibration>, std::optional<KvCalibration>>>;

inline KvCalibration calibration_or_none(const std::optional<KvCalibration>& calibration) {
  return calibration.value_or(KvCalibration{});
}

inline std::vector<KvLayerCalibration> layer_calibrations(const LayerCalibrations& given) {
  std::vector<KvLayerCalibration> made;
  for (const auto& [k, v] : given) made.push_back({calibration_or_none(k), calibration_or_none(v)});
  return made;
}

}  // namespace gyre::python
