#pragma once

#include <cstdint>
#include <memory>

#include "gyre/device.h"
#include "gyre/export.h"
#include "gyre/fence.h"

namespace gyre {

class GraphImpl;

// A recorded list, ready to run any number of times with the same memory and parameters. It holds
// the storage it uses. Several threads may replay one graph; the device runs one replay at a time.
class GYRE_API Graph {
 public:
  Graph(Graph&&) noexcept;
  Graph& operator=(Graph&&) noexcept;
  ~Graph();

  Fence replay() const;
  uint32_t size() const;  // commands

 private:
  friend class Encoder;
  Graph(Device device, std::unique_ptr<GraphImpl> impl);

  Device device_;
  std::unique_ptr<GraphImpl> impl_;
};

}  // namespace gyre
