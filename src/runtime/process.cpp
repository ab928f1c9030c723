#include "runtime/process.h"

#include <pthread.h>

#include <atomic>

namespace gyre {
namespace {

constinit std::atomic<uint64_t> generation{0};

// Where it cannot be registered, a child hangs as it would without.
[[maybe_unused]] const int kRegistered =
    pthread_atfork(nullptr, nullptr, [] { generation.fetch_add(1, std::memory_order_relaxed); });

}  // namespace

uint64_t process_generation() { return generation.load(std::memory_order_relaxed); }

}  // namespace gyre
