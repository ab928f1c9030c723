#include "serving/pool_state.h"

#include <algorithm>
#include <array>
#include <limits>

#include "cache/calibration_identity.h"
#include "cache/kv_cache_state.h"
#include "cache/snapshot.h"
#include "ops/kv_pages.h"
#include "runtime/device_impl.h"
#include "runtime/require.h"

namespace gyre {
namespace {

KvPageShape page_shape(const KvLayer& layer, uint64_t page_tokens) {
  return {.k = layer.k,
          .v = layer.v,
          .kv_heads = layer.kv_heads,
          .head_dim = layer.head_dim,
          .v_head_dim = layer.v_head_dim,
          .page_tokens = page_tokens,
          .latent = layer.latent};
}

void check_layer(const KvLayer& layer, uint64_t index, uint64_t page_tokens) {
  constexpr uint64_t kMaxKeys = std::numeric_limits<int32_t>::max();
  check_page_shape("kv_pool", page_shape(layer, page_tokens));
  require(layer.window <= kMaxKeys && layer.tail <= kMaxKeys && layer.sink_tokens <= kMaxKeys,
          "kv_pool: window, tail and sink_tokens of layer ", index, " must be below 2^31, got ",
          layer.window, ", ", layer.tail, " and ", layer.sink_tokens);
}

}  // namespace

std::vector<KvLayer> checked_pool_layers(const KvPoolOptions& options) {
  constexpr uint64_t kMaxSlots = std::numeric_limits<int32_t>::max();
  std::vector<KvLayer> layers = resolve_layers("kv_pool", options);
  for (uint64_t i = 0; i < layers.size(); ++i) check_layer(layers[i], i, options.page_tokens);
  check_layer_calibrations("kv_pool", layers, options.calibration);
  require(options.pages != 0 && options.pages <= kMaxSlots / options.page_tokens,
          "kv_pool: from 1 to ", kMaxSlots / options.page_tokens, " pages of ", options.page_tokens,
          " tokens, got ", options.pages);
  require(options.sequences != 0 && options.sequences <= 1 << 20,
          "kv_pool: sequences must be from 1 to 2^20, got ", options.sequences);
  require(options.step_tokens != 0 && options.step_tokens <= 1 << 24,
          "kv_pool: step_tokens must be from 1 to 2^24, got ", options.step_tokens);
  return layers;
}

uint32_t pool_calibration(std::span<const KvLayer> layers,
                          std::span<const KvLayerCalibration> calibrations) {
  std::vector<uint64_t> checksums;
  for (size_t i = 0; i < calibrations.size(); ++i)
    checksums.push_back(calibration_checksum({"kv_pool", i, layers[i].latent}, calibrations[i]));
  return calibration_identity(checksums);
}

uint64_t pool_geometry(std::span<const KvLayer> layers, uint64_t page_tokens,
                       uint32_t calibration) {
  const LayerShape common = common_shape(layers);
  std::vector<uint64_t> numbers = {common.kv_heads, common.head_dim, common.v_head_dim, page_tokens,
                                   layers.size()};
  for (const KvLayer& layer : layers) {
    for (const KvFormat format : {layer.k, layer.v}) {
      const std::array<uint32_t, 8> fields = snapshot_format_fields(describe(format));
      numbers.insert(numbers.end(), fields.begin(), fields.end());
    }
    numbers.insert(numbers.end(), {layer.window, layer.tail, layer.sink_tokens});
  }
  // Where all layers are alike, the checksum is that of files from before layers could differ.
  const bool uniform = snapshot_version(layers) == kSnapshotUniformVersion;
  for (uint64_t i = 0; i < layers.size() && !uniform; ++i) {
    const LayerShape shape = shape_of(layers[i]);
    numbers.insert(numbers.end(),
                   {shape.kv_heads, shape.head_dim, shape.v_head_dim, owner_field(layers, i)});
  }
  if (calibration != 0) numbers.push_back(calibration);
  return checksum_of(std::as_bytes(std::span(numbers)));
}

KvPoolState::KvPoolState(Device device_handle, const KvPoolOptions& wanted)
    : device(std::move(device_handle)),
      options(wanted),
      resolved(checked_pool_layers(options)),
      calibration(pool_calibration(resolved, options.calibration)),
      geometry(pool_geometry(resolved, options.page_tokens, calibration)),
      index(options.page_tokens, 0, 0) {
  require(impl_of(device) != nullptr, "kv_pool: the device handle is empty");
  if (options.v_head_dim == 0) options.v_head_dim = options.head_dim;
  const auto store = [&](const GroupKeys& keys, const KvLayer& stored) {
    const size_t group = add_group(keys);
    const KvPageShape shape = page_shape(stored, options.page_tokens);
    return Store{group, KvPages::allocate(device, shape, groups[group].pages())};
  };
  for (const KvLayer& layer : resolved) {
    Layer made;
    if (!options.calibration.empty()) made.calibration = options.calibration[layers.size()];
    KvLayer f16 = layer;
    f16.k = f16.v = KvFormat::f16;
    if (!shares_kv(layer)) made.body = store({layer.window, 0, false}, layer);
    if (made.body && layer.tail != 0) made.tail = store({layer.tail, 0, true}, f16);
    if (made.body && layer.sink_tokens != 0)
      made.sink_tokens = store({0, layer.sink_tokens, true}, f16);
    layers.push_back(std::move(made));
  }
  index = PrefixIndex(options.page_tokens, groups.size(), geometry);
}

size_t KvPoolState::add_group(const GroupKeys& keys) {
  for (size_t i = 0; i < groups.size(); ++i) {
    const GroupKeys& has = groups[i].keys();
    if (has.window == keys.window && has.limit == keys.limit && has.f16 == keys.f16) return i;
  }
  uint64_t pages = options.pages;
  const auto pages_of = [&](uint64_t tokens) {
    return (tokens + options.page_tokens - 1) / options.page_tokens;
  };
  // A window that begins inside a page has that page as well.
  if (keys.window != 0) {
    const uint64_t each = pages_of(keys.window + options.step_tokens) + 1;
    pages = std::min(pages, options.sequences * each);
  }
  if (keys.limit != 0) pages = std::min(pages, options.sequences * pages_of(keys.limit));
  groups.emplace_back(keys, pages, options.page_tokens);
  return groups.size() - 1;
}

std::string KvPoolState::group_name(size_t group) const {
  const GroupKeys& keys = groups[group].keys();
  if (keys.limit != 0) return join("sink tokens ", keys.limit);
  if (keys.window == 0) return "all keys";
  return join(keys.f16 ? "tail " : "window ", keys.window);
}

void KvPoolState::require_same_process(const char* op) const {
  impl_of(device)->require_same_process(op);
}

uint64_t KvPoolState::page_bytes(size_t group) const {
  uint64_t bytes = 0;
  for_stores(group, [&](const Store& store, uint64_t) { bytes += store.pages.bytes.shape(1); });
  return bytes;
}

// The oldest key that a query at `length` sees, if the pages of a window begin behind it.
std::optional<uint64_t> KvPoolState::lost_key(size_t group, uint64_t first_page,
                                              uint64_t length) const {
  const GroupKeys& keys = groups[group].keys();
  if (keys.f16 || keys.window == 0) return std::nullopt;
  const uint64_t oldest_seen = length + 1 > keys.window ? length + 1 - keys.window : 0;
  if (oldest_seen >= length || first_page * options.page_tokens <= oldest_seen) return std::nullopt;
  return oldest_seen;
}

void KvPoolState::check_window(const char* op, size_t group, uint64_t first_page,
                               uint64_t length) const {
  const std::optional<uint64_t> lost = lost_key(group, first_page, length);
  require(!lost, op, ": the pages of ", group_name(group), " no longer have key ", lost.value_or(0),
          ", which a query at ", length, " sees");
}

PageId KvPoolState::take(size_t group) {
  if (groups[group].free() == 0) evict(group, groups[group].oldest_cached());
  return groups[group].take();
}

void KvPoolState::uncache(uint32_t node, size_t group) {
  PageGroup& pages = groups[group];
  const PageId page = index.page(node, group);
  pages.uncache(page, pages.nodes(page) > 1 ? index.sibling_with(node, group) : kNoNode);
  index.set_page(node, group, kNoPage);
}

void KvPoolState::evict(size_t group, PageId page) {
  // Without its page of all keys or of sink tokens a prefix is none, and neither is what lies
  // behind it: every query sees them. Without a page of a window or a tail it cannot be resumed in
  // some places, in others it can.
  if (groups[group].keys().window == 0) {
    while (groups[group].nodes(page) != 0) evictions += erase_prefix(groups[group].node(page));
    return;
  }
  ++evictions;
  uint32_t node = groups[group].node(page);
  uncache(node, group);
  while (node != kNoNode && index.is_leaf(node) && index.is_empty(node)) {
    const uint32_t parent = index.parent(node);
    index.erase(node);
    node = parent;
  }
}

uint64_t KvPoolState::erase_prefix(uint32_t node) {
  uint64_t pages = 0;
  for (bool last = false; !last;) {
    const uint32_t leaf = index.first_leaf(node);
    last = leaf == node;
    for (size_t group = 0; group < groups.size(); ++group) {
      if (index.page(leaf, group) == kNoPage) continue;
      uncache(leaf, group);
      ++pages;
    }
    index.erase(leaf);
  }
  return pages;
}

}  // namespace gyre
