#pragma once

#include "gyre/device.h"
#include "gyre/prepare.h"

namespace gyre {

// Records what a model of this shape would: steps of every number of tokens that may have a kernel
// of its own, through KvCache and KvBatch. Refuses what they refuse. For a DryDevice.
void record_model(const Device& device, const ModelShape& shape);

}  // namespace gyre
