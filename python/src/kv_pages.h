#pragma once

#include "bound.h"

namespace gyre::python {

struct BoundKvPages {
  Device device;
  KvPages pages;
};

struct BoundScratch {
  Device device;
  Tensor tensor;
};

}  // namespace gyre::python
