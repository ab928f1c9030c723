#pragma once

#include <string_view>

#include "gyre/device.h"

namespace gyre::cuda {

DeviceInfo describe_device(int ordinal);  // says why it is not available
int checked_ordinal(
    std::string_view name);  // "cuda" and "cuda:0" are 0; throws where there is none

}  // namespace gyre::cuda
