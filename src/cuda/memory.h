#pragma once

#include <memory>

#include "cuda/stream.h"
#include "runtime/buffer_pool.h"

namespace gyre::cuda {

std::unique_ptr<MemorySource> device_memory(std::shared_ptr<Stream> stream);

// Memory of this GPU that somebody else allocated. What they do with it on streams of their own is
// theirs to order. Refuses all other memory.
std::shared_ptr<Storage> wrap_memory(uint64_t device_id, std::shared_ptr<Stream> stream,
                                     const Storage::Block& block, std::shared_ptr<void> owner);

}  // namespace gyre::cuda
