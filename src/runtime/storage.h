#pragma once

#include <cstdint>
#include <memory>

namespace gyre {

class DeviceImpl;

class Storage {
 public:
  struct Block {
    uint64_t address = 0;  // as the device sees it; also what hazards compare
    uint64_t bytes = 0;
    void* host = nullptr;  // null where the host cannot reach the memory
    bool read_only = false;
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

 private:
  uint64_t device_id_;
  Block block_;
};

}  // namespace gyre
