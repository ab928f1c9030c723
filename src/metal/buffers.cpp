#include "metal/buffers.h"

#include <algorithm>

#include "runtime/require.h"

namespace gyre::metal {

Buffers::Buffers(const Driver& api)
    : api_(api), device_(api.describe()), nothing_(api.buffer_make(kThreadgroupUnit)) {
  if (nothing_ == nullptr) fail(ErrorCode::out_of_memory, "metal: no memory for a buffer");
}

// All that was taken has come back: its pool holds this.
Buffers::~Buffers() { api_.buffer_free(nothing_); }

void* Buffers::take(uint64_t bytes) {
  if (bytes > device_.buffer_bytes) return nullptr;
  Buffer* const buffer = api_.buffer_make(bytes);
  if (buffer == nullptr) return nullptr;
  void* const contents = api_.buffer_contents(buffer);
  try {
    const std::lock_guard lock(mutex_);
    taken_.emplace(reinterpret_cast<uintptr_t>(contents), buffer);
  } catch (...) {
    api_.buffer_free(buffer);
    throw;
  }
  return contents;
}

void Buffers::give(void* contents) noexcept {
  Buffer* buffer = nullptr;
  {
    const std::lock_guard lock(mutex_);
    const auto found = taken_.find(reinterpret_cast<uintptr_t>(contents));
    buffer = found->second;
    taken_.erase(found);
  }
  api_.buffer_free(buffer);
}

Binding Buffers::find(const Storage& storage) const {
  if (const auto* const bound = dynamic_cast<const BoundStorage*>(&storage))
    return bound->binding();
  const std::lock_guard lock(mutex_);
  const auto found = taken_.find(storage.address());
  return {found != taken_.end() ? found->second : nullptr, 0};
}

AddressMap::AddressMap(std::span<const std::shared_ptr<Storage>> storages, const Buffers& buffers)
    : nothing_(buffers.nothing()) {
  regions_.reserve(storages.size());
  for (const std::shared_ptr<Storage>& storage : storages) {
    if (storage->bytes() == 0) continue;
    regions_.push_back(
        {storage->address(), storage->address() + storage->bytes(), buffers.find(*storage)});
  }
  std::ranges::sort(regions_, {}, &Region::begin);
  // Wrapped memory may overlap. What begins before an address and reaches furthest holds all of
  // whatever the address is part of.
  for (size_t i = 1; i < regions_.size(); ++i) {
    if (regions_[i].end >= regions_[i - 1].end) continue;
    const uint64_t begin = regions_[i].begin;
    regions_[i] = regions_[i - 1];
    regions_[i].at.offset += begin - regions_[i].begin;
    regions_[i].begin = begin;
  }
}

Binding AddressMap::find(uint64_t address) const {
  auto after = std::ranges::upper_bound(regions_, address, {}, &Region::begin);
  if (after == regions_.begin() || (--after)->end < address)
    fail(ErrorCode::invalid_argument, "metal: no storage of the list holds address ", address);
  if (after->end == address) return {nothing_, 0};
  return {after->at.buffer, after->at.offset + (address - after->begin)};
}

}  // namespace gyre::metal
