#pragma once

#include <nanobind/stl/array.h>

#include <array>

#include "bound.h"

namespace gyre::python {

using Sections = std::array<uint32_t, 4>;

// RopeOptions as Python names them, for each op that rotates.
struct RopeArguments {
  const std::string &pairing, &mode;
  std::optional<uint32_t> rotary_dim;
  const std::string &partner, &exponent;
  double base = 0;
  const Sections& sections;
  float magnitude = 0;
};
RopeOptions options_of(const RopeArguments& given);

}  // namespace gyre::python
