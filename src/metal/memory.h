#pragma once

#include <memory>

#include "metal/stream.h"
#include "runtime/buffer_pool.h"

namespace gyre::metal {

// Buffers that the GPU shares with the host. Copies wait for submitted work: Storage::host is null,
// as on every device whose work goes on after submit().
std::unique_ptr<MemorySource> shared_memory(std::shared_ptr<Stream> stream);

// Memory of the host that somebody else allocated, by the pages that it lies on. Refuses what Metal
// refuses.
std::shared_ptr<Storage> wrap_memory(uint64_t device_id, std::shared_ptr<Stream> stream,
                                     const Storage::Block& block, std::shared_ptr<void> owner);

}  // namespace gyre::metal
