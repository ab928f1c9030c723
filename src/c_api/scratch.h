#pragma once

#include <memory>

#include "c_api/handles.h"
#include "c_api/structs.h"
#include "gyre/c/attention.h"
#include "gyre/gyre.h"

namespace gyre::c_api {

// The caller's handle of memory that a call may replace. Its successor is made before the call,
// which must not be recorded and then fail.
class Scratch {
 public:
  explicit Scratch(gyre_tensor** handle) : handle_(handle) {
    if (handle == nullptr) return;
    next_ = std::make_unique<gyre_tensor>();
    next_->value = tensor(*handle);
  }
  Tensor* memory() const { return next_ ? &next_->value : nullptr; }
  void give_back() {
    if (!next_ || !next_->value.defined()) return;
    if (*handle_ != nullptr && next_->value.address() == (*handle_)->value.address()) return;
    delete *handle_;
    *handle_ = next_.release();
  }

 private:
  gyre_tensor** handle_;
  std::unique_ptr<gyre_tensor> next_;
};

// attend() of a cache or batch: give_back() when it has returned.
struct AttendCall {
  explicit AttendCall(const gyre_attend_inputs* inputs) : AttendCall(read(inputs, "inputs")) {}

  Scratch scratch;
  AttendInputs in;

 private:
  explicit AttendCall(const gyre_attend_inputs& given)
      : scratch(given.scratch),
        in{.q = tensor(given.q),
           .out = tensor(given.out),
           .lse = tensor(given.lse),
           .scratch = scratch.memory()} {}
};

}  // namespace gyre::c_api
