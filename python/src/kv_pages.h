#pragma once

#include "bound.h"

namespace gyre::python {

struct BoundKvPages {
  Device device;
  KvPages pages;
};

}  // namespace gyre::python
