#pragma once
// What a pool and its sequences know. The host's numbers are the truth; a batch takes what a step
// needs of them to the device.

#include <algorithm>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "cache/layers.h"
#include "gyre/kv_pool.h"
#include "gyre/pages.h"
#include "serving/page_group.h"
#include "serving/prefix_index.h"
#include "steps/log.h"

namespace gyre {

// Refuses options that no pool can have; returns the layers with every number filled in.
std::vector<KvLayer> checked_pool_layers(const KvPoolOptions& options);
// A checksum of everything that decides what a page's bytes mean.
uint64_t pool_geometry(std::span<const KvLayer> layers, uint64_t page_tokens, uint32_t calibration);
// Which calibration its layers have; 0: none. Reads device memory.
uint32_t pool_calibration(std::span<const KvLayer> layers,
                          std::span<const KvLayerCalibration> calibrations);

class Source;
struct PoolFile;

class KvPoolState {
 public:
  KvPoolState(Device device_handle, const KvPoolOptions& wanted);

  // The pages of one layer in one group.
  struct Store {
    size_t group = 0;
    KvPages pages{};
  };
  struct Layer {
    KvLayerCalibration calibration{};
    std::optional<Store> body{};         // none: the layer shares another's cache
    std::optional<Store> tail{};         // in 16 bits
    std::optional<Store> sink_tokens{};  // in 16 bits
  };

  void require_same_process(const char* op) const;  // refuses a child of fork()
  uint64_t available(size_t group) const { return groups[group].free() + groups[group].cached(); }
  PageId take(size_t group);  // evicts if there is no free one; something must be available
  // The index lets go of a node and of what lies behind it; returns how many pages that were.
  uint64_t erase_prefix(uint32_t node);
  // The index lets go of a page that it has, and of the prefixes that are of no use without it.
  void evict(size_t group, PageId page);
  // A row of a file of prefixes becomes a node, whose number is returned; see kv_pool_files.cpp.
  uint32_t load_prefix(const Source& source, const PoolFile& file, uint64_t row,
                       std::span<const uint32_t> nodes, std::vector<uint32_t>& added);
  // How many sink tokens a page of a sequence keeps, in a group that keeps these alone.
  uint64_t sink_tokens_in(size_t group, uint64_t page) const {
    const uint64_t limit = groups[group].keys().limit, begin = page * options.page_tokens;
    return limit > begin ? std::min(limit - begin, options.page_tokens) : 0;
  }
  // The page that a child of `parent` has for the sink tokens `kept`, if its bytes are these.
  PageId sink_page(uint32_t parent, size_t group, std::span<const int32_t> kept,
                   std::span<const std::byte> bytes) const;
  // Refuses a sequence of `length` tokens whose pages of a window begin behind what a query sees.
  void check_window(const char* op, size_t group, uint64_t first_page, uint64_t length) const;
  std::optional<uint64_t> lost_key(size_t group, uint64_t first_page, uint64_t length) const;
  uint64_t page_bytes(size_t group) const;  // of all its layers
  std::string group_name(size_t group) const;
  // Stores of a group, in the order of its layers. visit(store, number of the layer)
  template <class Visit>
  void for_stores(size_t group, const Visit& visit) const {
    for (uint64_t i = 0; i < layers.size(); ++i) {
      for (const std::optional<Store>* store :
           {&layers[i].body, &layers[i].tail, &layers[i].sink_tokens})
        if (*store && (*store)->group == group) visit(**store, i);
    }
  }

  Device device;
  KvPoolOptions options;
  std::vector<KvLayer> resolved;  // options.layers with every number filled in
  std::vector<PageGroup> groups;
  std::vector<Layer> layers;
  uint32_t calibration;
  uint64_t geometry;
  PrefixIndex index;
  std::shared_ptr<Steps> steps = std::make_shared<Steps>("kv_pool");
  uint64_t sequences = 0;
  uint64_t next_sequence = 0;
  uint64_t evictions = 0;
  uint64_t marks = 0;  // lists of sequences that were checked

 private:
  size_t add_group(const GroupKeys& keys);
  void uncache(uint32_t node, size_t group);
};

class KvSequenceState {
 public:
  explicit KvSequenceState(std::shared_ptr<KvPoolState> owner);
  KvSequenceState(const KvSequenceState&) = delete;
  KvSequenceState& operator=(const KvSequenceState&) = delete;
  ~KvSequenceState();

  // Pages [first, first + ids.size()) of the sequence in one group. Where they end, the next step
  // takes new ones.
  struct Pages {
    uint64_t first = 0;
    uint64_t begin = 0;  // of a tail: older keys have no copy in 16 bits
    std::vector<PageId> ids{};
    // Batches remember what they sent to the device. Since the epoch before, entries from `kept` on
    // have changed otherwise than by new ones at the end.
    uint64_t epoch = 0;
    uint64_t kept = 0;

    uint64_t end() const { return first + ids.size(); }
    bool has(uint64_t page) const { return page >= first && page < end(); }
    PageId at(uint64_t page) const { return ids[page - first]; }
    void changed(uint64_t from) {
      ++epoch;
      kept = from;
    }
  };

  // Refuses while a step is open that has not reached every layer.
  void require_no_step(const char* op) const;
  void require_written(const char* op) const;
  void require_submitted(const char* op) const {
    require_written(op);
    unwritten.require_submitted(op, *pool->steps, length);
  }
  bool can_shorten(uint64_t to) const;  // what check_shorter() checks
  void check_shorter(const char* op, uint64_t to) const;
  void shorten(uint64_t to);  // what check_shorter() allows
  // Oldest key that the group still has.
  uint64_t oldest(size_t group) const {
    return std::max(groups[group].begin, groups[group].first * pool->options.page_tokens);
  }

  std::shared_ptr<KvPoolState> pool;
  uint64_t number;  // never used again in its pool
  uint64_t length = 0;
  UnwrittenTokens unwritten;
  std::vector<Pages> groups;
  const StepLog* step = nullptr;  // of the batch whose incomplete step has this sequence
  uint64_t listed = 0;            // mark of the last list that it was in
};

}  // namespace gyre
