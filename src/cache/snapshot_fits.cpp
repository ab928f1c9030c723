// Whether a cache can take a snapshot, and which number is in the way.
#include "cache/layers.h"
#include "cache/snapshot.h"
#include "runtime/require.h"

namespace gyre {
namespace {

void same(const std::string& where, const std::string& what, uint64_t snapshot, uint64_t cache) {
  require(snapshot == cache, where, ": ", what, " is ", snapshot, " in the snapshot and ", cache,
          " in the cache");
}

void same_format(const std::string& where, const std::string& what, KvFormat snapshot,
                 KvFormat cache) {
  require(snapshot == cache, where, ": ", what, " is ", name(snapshot), " in the snapshot and ",
          name(cache), " in the cache");
}

void check_layer(const std::string& where, size_t index, const KvSnapshotInfo& snapshot,
                 const KvSnapshotInfo& cache) {
  const KvLayer &a = snapshot.options.layers[index], &b = cache.options.layers[index];
  const std::string of = " of layer " + std::to_string(index);
  same(where, "kv_heads" + of, a.kv_heads, b.kv_heads);
  same(where, "head_dim" + of, a.head_dim, b.head_dim);
  same(where, "v_head_dim" + of, a.v_head_dim, b.v_head_dim);
  same(where, "the layer with the cache" + of, owner_of(snapshot.options.layers, index),
       owner_of(cache.options.layers, index));
  same(where, "latent" + of, a.latent ? 1 : 0, b.latent ? 1 : 0);
  same_format(where, "K" + of, a.k, b.k);
  same_format(where, "V" + of, a.v, b.v);
  same(where, "window" + of, a.window, b.window);
  same(where, "tail" + of, a.tail, b.tail);
  same(where, "sink_tokens" + of, a.sink_tokens, b.sink_tokens);
  // A key's slot in a ring depends on the ring's size.
  if (a.window != 0)
    same(where, "the ring's slots" + of, snapshot.slots[index].body, cache.slots[index].body);
  same(where, "the tail's slots" + of, snapshot.slots[index].tail, cache.slots[index].tail);
}

}  // namespace

void check_snapshot_fits(const std::string& where, const KvSnapshotInfo& snapshot,
                         const KvSnapshotInfo& cache) {
  const KvCacheOptions &a = snapshot.options, &b = cache.options;
  same(where, "the number of layers", a.layers.size(), b.layers.size());
  for (size_t i = 0; i < a.layers.size(); ++i) check_layer(where, i, snapshot, cache);
  require(snapshot.calibration == cache.calibration, where,
          ": the snapshot was written with calibration ", snapshot.calibration, ", the cache has ",
          cache.calibration, " (0: none)");
  require(a.capacity <= b.capacity, where, ": the snapshot has a capacity of ", a.capacity,
          ", the cache only ", b.capacity);
}

}  // namespace gyre
