#pragma once
// Runs kernels' text on the host, a fiber for each thread of a block: slow, but exact about what
// synchronises with what, so that kernels' logic is tested where there is no GPU. A warp runs until
// it waits for others: what it must not do before them shows. The blocks of a cluster run at the
// same time, clusters one after another; every lane of a warp must take part in its shuffles. From
// cluster to cluster blocks, warps and lanes take turns in another order, so that none hides a
// barrier that is missing.

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "fibers/guarded.h"
#include "fibers/known_stack.h"

namespace gyre::fibers {

// GCC's own jumps keep no signal mask and no registers beyond what the compiler needs: a third of
// the time of a run. Clang does not have them everywhere.
#if defined(__GNUC__) && !defined(__clang__)
using Jump = void* [5];
#define GYRE_SET_JUMP(at) __builtin_setjmp(at)
[[gnu::noinline, GYRE_SWITCHES_STACKS]] inline void jump_to(Jump& at) { __builtin_longjmp(at, 1); }
#else
using Jump = jmp_buf;
#define GYRE_SET_JUMP(at) _setjmp(at)
[[GYRE_SWITCHES_STACKS]] inline void jump_to(Jump& at) { _longjmp(at, 1); }
#endif

struct Index {
  unsigned int x = 0, y = 0, z = 0;
};

inline Index thread_index, block_index;  // of the running thread
inline Index grid_size, block_size;      // of the launch

constexpr unsigned int kWarp = 32;

struct Barrier {
  unsigned int waiting = 0, alive = 0;
  uint64_t generation = 0;
};

// On its way to shared memory.
struct Copy {
  unsigned char* to;
  const void* from;  // null: zeros
  size_t bytes;
  std::vector<unsigned char> read = {};  // what came before the command ahead ran; empty: not yet
};

// Where a thread runs, one after the other: making a context costs more than a short kernel. A
// context starts it; from then on jumps switch, which cost no system call.
struct Stack {
  std::unique_ptr<char[]> memory;
  ucontext_t context{};
  Jump at{};
  KnownStack known;
  bool started = false;

  Stack() { make_known(known); }
  Stack(const Stack&) = delete;
  Stack& operator=(const Stack&) = delete;
  ~Stack() { forget(known); }
};

struct Fiber {
  Stack* stack = nullptr;
  unsigned int thread = 0;
  bool done = false, pdl_waited = false;
  std::vector<std::vector<Copy>> copies;  // groups; the last one is still open
};

struct Block {
  std::vector<Fiber> fibers;
  std::vector<Barrier> warps, groups;             // groups: of warps
  std::vector<uint64_t> exchange;                 // a lane's value, while its warp shuffles
  std::vector<std::array<uint64_t, 8>> operands;  // a lane's, while its warp multiplies
  Guarded shared;
  Barrier all, pdl_wait;
  Index index;
  Fiber* running = nullptr;
};

struct Cluster {
  std::vector<Block> blocks;
  Barrier all;
  uint64_t passed = 0;  // barriers, by threads
  Jump scheduler{};
  std::function<void()> body;
  std::string error;
};

inline Cluster* cluster = nullptr;
inline uint64_t clusters_run = 0;                   // which order the next one runs in
inline Block* block = nullptr;                      // of the cluster, that of the running thread
inline std::vector<std::unique_ptr<Stack>> stacks;  // one a thread, kept from cluster to cluster

inline KnownStack scheduler_stack;

[[gnu::noinline, GYRE_SWITCHES_STACKS]] inline void yield() {
  begin_switch(block->running->stack->known, scheduler_stack);
  if (GYRE_SET_JUMP(block->running->stack->at) == 0) jump_to(cluster->scheduler);
  end_switch(block->running->stack->known, scheduler_stack);
}

[[gnu::noinline, GYRE_SWITCHES_STACKS]] inline void resume(Stack& stack) {
  begin_switch(scheduler_stack, stack.known);
  if (GYRE_SET_JUMP(cluster->scheduler) != 0) {
    end_switch(scheduler_stack, block->running->stack->known);
    return;
  }
  if (stack.started) jump_to(stack.at);
  stack.started = true;
  setcontext(&stack.context);
}

// The launch throws: an exception of the fiber's own would have no handler.
[[noreturn, GYRE_SWITCHES_STACKS]] inline void fail(std::string&& error) {
  cluster->error = std::move(error);
  begin_switch(block->running->stack->known, scheduler_stack);
  jump_to(cluster->scheduler);
  __builtin_unreachable();
}

inline void require_pdl_wait() {
  if (!block->running->pdl_waited)
    fail("memory of others was used before the kernel ahead had ended");
}

inline void release_if_full(Barrier& barrier) {
  if (barrier.waiting == 0 || barrier.waiting != barrier.alive) return;
  barrier.waiting = 0;
  ++barrier.generation;
}

inline void wait(Barrier& barrier) {
  const uint64_t generation = barrier.generation;
  ++barrier.waiting;
  release_if_full(barrier);
  while (barrier.generation == generation) yield();
  ++cluster->passed;
}

// As on the device, also those that have ended are waited for.
inline void wait_for_warps(unsigned int group, unsigned int count) {
  Barrier& barrier = block->groups[group];
  barrier.alive = count * kWarp;
  wait(barrier);
}

inline unsigned int lane() { return block->running->thread % kWarp; }
inline Barrier& warp() { return block->warps[block->running->thread / kWarp]; }

// Where a lane's value, or operands, lie while its warp works together. Two places take turns: who
// uses one again has seen all lanes at the other, behind what they read here.
inline size_t meeting_place() {
  return (warp().generation % 2 * block->warps.size() + block->running->thread / kWarp) * kWarp;
}

inline uint64_t exchanged(uint64_t value, unsigned int source) {
  uint64_t* const slots = &block->exchange[meeting_place()];
  slots[lane()] = value;
  wait(warp());
  return slots[source % kWarp];
}

template <class T>
T shuffle(T value, unsigned int source) {
  static_assert(sizeof(T) <= sizeof(uint64_t));
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  bits = exchanged(bits, source);
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}

// Thread after thread on one stack.
inline void run_fibers() {
  end_switch(block->running->stack->known, scheduler_stack);
  for (;;) {
    cluster->body();
    Fiber& fiber = *block->running;
    if (!fiber.pdl_waited) fail("a thread ended that did not wait for the kernel ahead");
    fiber.done = true;
    for (Barrier* const barrier : {&warp(), &block->all, &block->pdl_wait, &cluster->all}) {
      --barrier->alive;
      release_if_full(*barrier);
    }
    yield();
  }
}

inline Stack& stack_at(size_t i) {
  constexpr size_t kBytes = 256 << 10;
  while (stacks.size() <= i) {
    auto stack = std::make_unique<Stack>();
    stack->memory = std::make_unique_for_overwrite<char[]>(kBytes);
    getcontext(&stack->context);
    stack->context.uc_stack.ss_sp = stack->memory.get();
    stack->context.uc_stack.ss_size = kBytes;
    stack->known.bottom = stack->memory.get();
    stack->known.bytes = kBytes;
    makecontext(&stack->context, run_fibers, 0);
    stacks.push_back(std::move(stack));
  }
  return *stacks[i];
}

// `stack` is the first of those for the block's threads.
inline void prepare(Block& b, unsigned int threads, size_t stack) {
  std::fill(b.shared.begin(), b.shared.end(), 0xAB);  // what nobody wrote shows
  b.fibers = std::vector<Fiber>(threads);
  b.warps.assign((threads + kWarp - 1) / kWarp, {});
  b.groups.assign(b.warps.size(), {});
  b.exchange.assign(2 * b.warps.size() * kWarp, 0);
  b.operands.assign(2 * b.warps.size() * kWarp, {});
  b.all = b.pdl_wait = {0, threads, 0};
  for (unsigned int i = 0; i < threads; ++i) {
    b.fibers[i].thread = i;
    b.fibers[i].stack = &stack_at(stack + i);
    ++b.warps[i / kWarp].alive;
  }
}

inline void run(Block& b, Fiber& fiber) {
  block = &b;
  b.running = &fiber;
  block_index = b.index;
  thread_index = {fiber.thread, 0, 0};
  resume(*fiber.stack);
  if (cluster->error.empty()) return;
  stacks.clear();  // fibers that were left in the middle of something lie there
  throw std::out_of_range(cluster->error);
}

// Every cluster begins elsewhere, every other one runs backwards.
inline size_t in_turn(size_t i, size_t count) {
  const size_t from = (i + clusters_run / 2) % count;
  return clusters_run % 2 == 0 ? from : count - 1 - from;
}

// Until its threads have ended or wait for other warps. False: they had ended before.
inline bool run_warp(Block& b, size_t warp) {
  const size_t begin = warp * kWarp, count = std::min<size_t>(b.fibers.size() - begin, kWarp);
  bool busy = false;
  for (uint64_t passed = ~uint64_t{0}; passed != cluster->passed;) {
    passed = cluster->passed;
    for (size_t i = 0; i < count; ++i) {
      Fiber& fiber = b.fibers[begin + in_turn(i, count)];
      if (fiber.done) continue;
      busy = true;
      run(b, fiber);
    }
  }
  return busy;
}

// The cluster whose first block is `first`.
inline void run_cluster(const Index& first, unsigned int threads) {
  const auto size = static_cast<unsigned int>(cluster->blocks.size());
  cluster->all = {0, size * threads, 0};
  for (unsigned int rank = 0; rank < size; ++rank) {
    Block& b = cluster->blocks[rank];
    b.index = {first.x + rank, first.y, first.z};
    prepare(b, threads, size_t{rank} * threads);
  }
  for (bool busy = true; busy;) {
    busy = false;
    for (size_t i = 0; i < size; ++i) {
      Block& b = cluster->blocks[in_turn(i, size)];
      const size_t warps = b.warps.size();
      for (size_t w = 0; w < warps; ++w) busy = run_warp(b, in_turn(w, warps)) || busy;
    }
  }
  ++clusters_run;
}

// A launch from inside a thread of another: it has stacks of its own, and leaves all as it was.
class Nested {
 public:
  Nested() { std::swap(stacks, spare()); }
  Nested(const Nested&) = delete;
  Nested& operator=(const Nested&) = delete;
  ~Nested() {
    std::swap(stacks, spare());
    cluster = cluster_, block = block_, scheduler_stack = scheduler_stack_;
    thread_index = thread_, block_index = block_at_, grid_size = grid_, block_size = size_;
  }

 private:
  static std::vector<std::unique_ptr<Stack>>& spare() {
    static std::vector<std::unique_ptr<Stack>> kept;
    return kept;
  }

  Cluster* cluster_ = cluster;
  Block* block_ = block;
  KnownStack scheduler_stack_ = scheduler_stack;
  Index thread_ = thread_index, block_at_ = block_index, grid_ = grid_size, size_ = block_size;
};

// kernel<<<grid, threads, shared_bytes>>>(arguments...) in clusters of `size` blocks along x
template <class Kernel, class... Arguments>
void launch_clusters(const Index& grid, unsigned int size, unsigned int threads,
                     size_t shared_bytes, const Kernel& kernel, const Arguments&... arguments) {
  if (size == 0 || grid.x % size != 0) {
    throw std::invalid_argument("launch_clusters: grid.x " + std::to_string(grid.x) +
                                " is not a multiple of the cluster's size " + std::to_string(size));
  }
  std::optional<Nested> nested;
  if (cluster != nullptr) nested.emplace();
  Cluster made;
  made.blocks.resize(size);
  for (Block& b : made.blocks) b.shared.resize(shared_bytes);
  made.body = [&] { kernel(arguments...); };
  cluster = &made;
  grid_size = grid;
  block_size = {threads, 1, 1};
  // Not as a device would: what blocks that differ in y or z must not share shows.
  for (unsigned int x = 0; x < grid.x; x += size) {
    for (unsigned int y = 0; y < grid.y; ++y) {
      for (unsigned int z = 0; z < grid.z; ++z) run_cluster({x, y, z}, threads);
    }
  }
  cluster = nullptr;
  block = nullptr;
}
// kernel<<<grid, threads, shared_bytes>>>(arguments...)
template <class Kernel, class... Arguments>
void launch(const Index& grid, unsigned int threads, size_t shared_bytes, const Kernel& kernel,
            const Arguments&... arguments) {
  launch_clusters(grid, 1, threads, shared_bytes, kernel, arguments...);
}

// 128-byte aligned, as the device's version.
inline unsigned char* dynamic_shared(Block& of) { return of.shared.data(); }
inline unsigned char* dynamic_shared() { return dynamic_shared(*block); }
inline uint32_t dynamic_shared_bytes() { return static_cast<uint32_t>(block->shared.size()); }

inline uint32_t cluster_size() { return static_cast<uint32_t>(cluster->blocks.size()); }
inline uint32_t cluster_rank() { return block_index.x % cluster_size(); }
inline void cluster_wait() { wait(cluster->all); }
// What block `rank` has where this block has `mine`. A block that has ended has nothing any more:
// on a device its shared memory may be another's by then.
inline void* cluster_pointer(const void* mine, uint32_t rank) {
  const uintptr_t offset =
      reinterpret_cast<uintptr_t>(mine) - reinterpret_cast<uintptr_t>(dynamic_shared());
  if (offset >= dynamic_shared_bytes())
    fail("cluster_pointer: not in this block's dynamic shared memory");
  if (rank >= cluster_size() || cluster->blocks[rank].all.alive == 0) {
    fail("cluster_pointer: block " + std::to_string(rank) + " of " +
         std::to_string(cluster_size()) + " is not running");
  }
  return dynamic_shared(cluster->blocks[rank]) + offset;
}

// Every lane puts down its operands, then each computes from those of all.
template <class Compute>
void with_operands(const std::array<uint64_t, 8>& mine, const Compute& compute) {
  std::array<uint64_t, 8>* const lanes = &block->operands[meeting_place()];
  lanes[lane()] = mine;
  wait(warp());
  compute(lanes);
}

}  // namespace gyre::fibers
