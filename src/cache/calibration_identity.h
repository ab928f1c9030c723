#pragma once
// Which calibration a cache's bytes were written with.

#include <span>
#include <vector>

#include "gyre/kv_cache.h"

namespace gyre {

// Refuses calibrations that do not fit the resolved layers: none at all, or one for each layer.
// `op` opens the messages.
void check_layer_calibrations(const char* op, const std::vector<KvLayer>& layers,
                              const std::vector<KvLayerCalibration>& calibrations);

// Which layer a message is about, and whether it is latent.
struct CalibratedLayer {
  const char* op;
  uint64_t index;
  bool latent = false;
};

// A checksum of the numbers of a layer's calibration; 0: it has none. Reads device memory, and
// refuses a matrix that is not the inverse.
uint64_t calibration_checksum(const CalibratedLayer& layer, const KvLayerCalibration& calibration);
// One number for all layers, in 32 bits; 0: none has a calibration.
uint32_t calibration_identity(std::span<const uint64_t> checksums);

}  // namespace gyre
