#pragma once
// What a KvCache holds: memory, and where the sequence is. The host's numbers are the truth; the
// device's copy follows with every begin_step, rollback and clear, in the order of the commands.

#include <span>
#include <vector>

#include "cache/layers.h"
#include "gyre/kv_cache.h"
#include "gyre/snapshot.h"
#include "ops/cache_ops.h"
#include "steps/log.h"

namespace gyre {

// Refuses options that no cache can have; returns the layers with every number filled in.
std::vector<KvLayer> checked_cache_layers(const KvCacheOptions& options);
// Tokens of the tail, which is the same in all layers that have one.
uint64_t cache_tail_tokens(std::span<const KvLayer> layers);
// Slots of a tail's ring: the oldest query of a step sees its whole tail, and after a step was
// taken back the next one does.
uint64_t cache_tail_slots(const KvCacheOptions& options, uint64_t tail_tokens);

class KvCache::State {
 public:
  State(Device device_handle, const KvCacheOptions& wanted);

  // Memory of a layer. One that shares another's cache has none.
  struct Layer {
    CacheSegments segments;
    uint64_t calibration = 0;  // checksum
    uint64_t bytes() const;
  };

  // Keys in the cache. Keys [tail_begin, length) are also in the rings of the tails.
  struct Sequence {
    uint64_t length = 0;
    uint64_t tail_begin = 0;
    uint64_t peak = 0;  // longest since it was cleared: rings have lost what is too far behind
    uint64_t step = 0;  // tokens of the last begin_step(); 0: none to append
    StepLog::Place place() const { return {length, peak, step, 0}; }
    abi::KvExtendParams params() const;
  };

  // The layer whose memory this one reads; or writes, which a layer that shares must not.
  uint64_t owner(const char* op, uint64_t layer) const;
  const Layer& writable(const char* op, uint64_t layer) const;
  uint64_t ring_slots(const KvLayer& layer) const;
  uint64_t tokens_of(const char* op, const Tensor& k) const;          // that a call appends
  const void* list_of(const char* op, const Encoder& encoder) const;  // refuses a second encoder
  void require_complete(const char* op) const;  // a step that lacks layers, or dropped tokens
  NewNote append_note(const char* op, uint64_t layer, uint64_t tokens) const;
  void write(const char* op, Encoder& encoder, const Sequence& next);
  // What `held` says is in use, into a cache made with the same options.
  void copy_layers(Encoder& encoder, const KvSnapshotInfo& held, const State& to,
                   const NewNote* note = nullptr) const;
  KvSnapshotInfo snapshot() const;  // geometry and sequence; no sections yet

  Device device;
  KvCacheOptions options;
  std::vector<KvLayer> resolved;  // options.layers with every number filled in
  std::vector<Layer> layers;
  uint64_t tail_tokens = 0;  // of the layers that have a tail
  uint32_t calibration = 0;  // identity of all layers' calibrations
  Tensor state;              // abi::KvState
  Tensor positions;          // i32 [step_tokens]
  AttendScratch scratch;
  Sequence sequence;
  UnwrittenTokens unwritten;
  std::shared_ptr<Steps> steps = std::make_shared<Steps>("kv_cache");
  std::shared_ptr<StepLog> log;
};

}  // namespace gyre
