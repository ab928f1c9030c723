#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "metal/driver.h"
#include "runtime/storage.h"

namespace gyre::metal {

// A device's buffers by the addresses of their contents, which is how tensors know memory.
// Thread-safe.
class Buffers {
 public:
  explicit Buffers(const Driver& api);
  Buffers(const Buffers&) = delete;
  Buffers& operator=(const Buffers&) = delete;
  ~Buffers();

  const Driver& api() const { return api_; }
  const Description& device() const { return device_; }
  Buffer* nothing() const { return nothing_; }  // bound where an argument is absent

  void* take(uint64_t bytes);  // zero-filled contents of a new buffer; null: there is none
  void give(void* contents) noexcept;
  Binding find(const Storage& storage) const;  // where its first byte lies

 private:
  const Driver& api_;
  const Description device_;
  Buffer* nothing_ = nullptr;
  mutable std::mutex mutex_;
  std::map<uint64_t, Buffer*> taken_;  // by address
};

// Storage that is not of take() and knows its buffer itself.
class BoundStorage : public Storage {
 public:
  BoundStorage(uint64_t device_id, const Block& block, const Binding& binding)
      : Storage(device_id, block), binding_(binding) {}

  const Binding& binding() const { return binding_; }

 private:
  Binding binding_;
};

// Where the arguments of a list lie: found among the storages that the list holds.
class AddressMap {
 public:
  AddressMap(std::span<const std::shared_ptr<Storage>> storages, const Buffers& buffers);

  // The buffer that `address` lies in. The last byte's successor, which an empty view may have, is
  // in none: it gets the buffer of absent arguments.
  Binding find(uint64_t address) const;

 private:
  struct Region {
    uint64_t begin = 0, end = 0;
    Binding at{};
  };

  std::vector<Region> regions_;  // by begin; each is the one that reaches furthest so far
  Buffer* nothing_;
};

}  // namespace gyre::metal
