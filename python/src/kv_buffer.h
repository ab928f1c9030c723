#pragma once

#include "bound.h"

namespace gyre::python {

// As arguments have it; name(KvRole) is for messages.
inline std::string role_name(KvRole role) { return role == KvRole::k ? "k" : "v"; }

struct BoundKvBuffer {
  Device device;
  KvBuffer buffer;
};

}  // namespace gyre::python
