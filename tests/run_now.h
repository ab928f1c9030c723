#pragma once

#include <exception>

#include "gyre/encoder.h"
#include "gyre/fence.h"

namespace gyre::test {

// An encoder for one call: `rope(RunNow(device), in)` records, submits and waits.
class RunNow {
 public:
  explicit RunNow(const Device& device) : encoder_(device) {}
  RunNow(const RunNow&) = delete;
  RunNow& operator=(const RunNow&) = delete;
  ~RunNow() noexcept(false) {
    if (std::uncaught_exceptions() == thrown_before_) encoder_.submit().wait();
  }
  operator Encoder&() { return encoder_; }

 private:
  Encoder encoder_;
  int thrown_before_ = std::uncaught_exceptions();
};

}  // namespace gyre::test
