#pragma once

#include <memory>

#include "runtime/buffer_pool.h"

namespace gyre::cpu {

std::unique_ptr<MemorySource> host_memory();

}  // namespace gyre::cpu
