#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "gyre/device.h"
#include "gyre/export.h"
#include "gyre/kv_cache.h"

namespace gyre {

struct KvPoolOptions {
  uint64_t kv_heads = 0;  // of the layers that give none; so are the next two
  uint64_t head_dim = 0;
  uint64_t v_head_dim = 0;  // 0: head_dim
  std::vector<KvLayer> layers = {kDefaultKvLayer};
  uint64_t pages = 0;         // of the layers that see all keys
  uint64_t page_tokens = 64;  // a multiple of 8, up to 1024; 16, 32, 64 and 128 are tuned
  // Layers with a window, tails and sink tokens keep few pages of a sequence. They get as many as
  // this many sequences need that take this many tokens in one step, and never more than `pages`.
  uint64_t sequences = 64;
  uint64_t step_tokens = 512;
  std::vector<KvLayerCalibration> calibration{};  // as in KvCacheOptions
};

// Pages of layers that keep the same keys: one list of free pages, and a page's number is the same
// in all its layers.
struct KvGroupInfo {
  std::string name{};              // "all keys", "window 1024", "tail 128", "sink tokens 4"
  std::vector<uint64_t> layers{};  // by number; those that share another's cache have no pages
  uint64_t page_bytes = 0;         // of all its layers
  uint64_t pages = 0;              // used + cached + free
  uint64_t used = 0;               // that a sequence holds
  uint64_t shared = 0;             // that several hold; counted in `used`
  uint64_t cached = 0;             // that only the prefix index holds: evicted when needed
  uint64_t free = 0;
};

struct KvPoolInfo {
  std::vector<KvGroupInfo> groups{};
  uint64_t bytes = 0;       // of all pages
  uint64_t used_bytes = 0;  // of pages that sequences hold
  uint64_t sequences = 0;
  uint64_t prefixes = 0;     // pages of tokens that the prefix index knows
  uint64_t evictions = 0;    // pages taken from the prefix index so far
  uint32_t calibration = 0;  // which calibration its pages are written with; 0: none
};

class KvPool;
class KvBatch;
class KvPoolState;
class KvSequenceState;

// Keys and values of one sequence: a list of pages of its pool. A handle that can be moved;
// dropping it gives its pages back. The pool's memory lives as long as a sequence of it.
// None of these calls touches the device: what is recorded already goes on with the old pages.
// Tokens of a step whose list was dropped must be rolled back before the sequence is used again.
class GYRE_API KvSequence {
 public:
  KvSequence(KvSequence&&) noexcept;
  KvSequence& operator=(KvSequence&&) noexcept;
  ~KvSequence();

  uint64_t length() const;  // tokens, those of a step that was begun included

  // Shares all pages. The first write to a shared page copies it (KvBatch::begin_step).
  KvSequence fork() const;
  // Drops the newest. Refused where a window has lost what the shorter sequence would see. Behind
  // the 16-bit tail, the tail begins anew: older keys stay compressed.
  void rollback(uint64_t tokens);
  void clear();

 private:
  friend class KvPool;
  friend class KvBatch;
  explicit KvSequence(std::shared_ptr<KvSequenceState> state);
  KvSequenceState& state(const char* op) const;

  std::shared_ptr<KvSequenceState> state_;
};

// Device memory for the pages of all layers, and who holds which page. A copy of the handle is the
// same pool. One thread at a time, its sequences and batches included. A refused call changes
// nothing; one that fails on its way may have evicted prefixes. docs/serving.md has the rules.
class GYRE_API KvPool {
 public:
  KvPool(Device device, const KvPoolOptions& options);

  const KvPoolOptions& options() const;        // as given; a v_head_dim of 0 filled in
  const std::vector<KvLayer>& layers() const;  // with every number filled in
  KvPoolInfo describe() const;

  KvSequence sequence() const;  // an empty one

  // The prefix index. publish() makes the full pages of a sequence known under its tokens; the
  // index then shares these pages. match() returns a sequence that begins with the longest known
  // prefix of `tokens`, in whole pages; its length says how long that is. Publish again as the
  // sequence grows: a prefix can be matched where windows and tails still had all they need.
  void publish(const KvSequence& sequence, std::span<const int32_t> tokens) const;
  KvSequence match(std::span<const int32_t> tokens) const;
  void forget() const;  // empties the index

  // A page of a sequence as bytes: of all layers that still have it, with a checksum. To offload
  // it, or to send it to another pool of the same geometry, where import_page() continues a
  // sequence with it; pages come in order. What is exported must have been submitted, and before an
  // import everything that is recorded for the pool.
  std::vector<std::byte> export_page(const KvSequence& sequence, uint64_t page) const;
  void import_page(KvSequence& sequence, std::span<const std::byte> bytes) const;

  // Files, under the same condition. A file appears at `path` as a whole. One that is damaged or of
  // another geometry is refused, and so is one that the pool has no pages for; then the pool is as
  // it was. load_prefixes() adds to what the index knows and returns how many pages were new.
  void save(const KvSequence& sequence, const std::string& path) const;
  KvSequence load(const std::string& path) const;
  void save_prefixes(const std::string& path) const;
  uint64_t load_prefixes(const std::string& path) const;

 private:
  friend class KvBatch;
  friend struct Internals;
  KvPoolState& state() const;

  std::shared_ptr<KvPoolState> state_;
};

}  // namespace gyre
