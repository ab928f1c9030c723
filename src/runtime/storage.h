#pragma once

#include <cstdint>
#include <memory>

#include "gyre/device.h"
#include "runtime/internals.h"
#include "runtime/process.h"
#include "runtime/require.h"

namespace gyre {

class DeviceImpl;

class Storage {
 public:
  struct Block {
    uint64_t address = 0;  // as the device sees it; also what hazards compare
    uint64_t bytes = 0;
    void* host = nullptr;  // null where the host cannot reach the memory
    bool read_only = false;
    OwnerRelease release = OwnerRelease::when_done;  // of wrapped memory
  };

  Storage(uint64_t device_id, const Block& block) : device_id_(device_id), block_(block) {}
  Storage(const Storage&) = delete;
  Storage& operator=(const Storage&) = delete;
  virtual ~Storage() = default;

  uint64_t device_id() const { return device_id_; }
  uint64_t address() const { return block_.address; }
  uint64_t bytes() const { return block_.bytes; }
  void* host() const { return block_.host; }
  bool read_only() const { return block_.read_only; }
  // Refuses a child of fork(), which has what its parent's device was in the middle of.
  void require_same_process(const char* op) const {
    if (process_ != process_generation()) refuse_child(op);
  }

  // Copies to and from memory that the host cannot reach. They see all submitted work and are done
  // when they return.
  virtual void read(uint64_t /*offset*/, void* /*to*/, uint64_t /*bytes*/) const { refuse_copy(); }
  virtual void write(uint64_t /*offset*/, const void* /*from*/, uint64_t /*bytes*/) const {
    refuse_copy();
  }
  OwnerRelease release() const { return block_.release; }
  // True where the memory is somebody else's and must not go before submitted work is done; a
  // device's own memory is reused in the order of the work.
  virtual bool held_by_work() const { return false; }

  [[noreturn]] static void refuse_copy() {
    fail(ErrorCode::unsupported, "tensor: the memory is not visible to the host");
  }

 private:
  [[noreturn]] static void refuse_child(const char* op) {
    fail(ErrorCode::device_lost, op,
         ": the tensor's device was opened before fork(); open one in the child");
  }

  uint64_t device_id_;
  const uint64_t process_ = process_generation();
  Block block_;
};

}  // namespace gyre
