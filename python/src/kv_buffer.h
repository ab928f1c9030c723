#pragma once

#include "bound.h"

namespace gyre::python {

struct BoundKvBuffer {
  Device device;
  KvBuffer buffer;
};

}  // namespace gyre::python
