#include "gyre/c/kv_pool.h"

#include <cstddef>
#include <span>

#include "c_api/convert.h"
#include "c_api/handles.h"

using namespace gyre::c_api;

namespace {

const gyre::KvPool& value(const gyre_kv_pool* pool) { return deref(pool, "pool").value; }
template <class Sequence>
auto& value_of(Sequence* sequence) {
  return deref(sequence, "sequence").value;
}

gyre::KvPoolOptions kv_pool_options(const gyre_kv_pool_options* options) {
  const gyre_kv_pool_options given = read(options, "options");
  gyre::KvPoolOptions made;
  made.kv_heads = given.kv_heads;
  made.head_dim = given.head_dim;
  made.v_head_dim = given.v_head_dim;
  made.layers = kv_layers(given.layers, given.layer_count);
  made.pages = given.pages;
  made.page_tokens = or_default(given.page_tokens, made.page_tokens);
  made.sequences = or_default(given.sequences, made.sequences);
  made.step_tokens = or_default(given.step_tokens, made.step_tokens);
  made.calibration = kv_calibrations(given.calibration, given.calibration_count);
  return made;
}

std::span<const int32_t> token_list(const int32_t* tokens, uint64_t count) {
  if (count != 0) deref(tokens, "tokens");
  return {tokens, count};
}

}  // namespace

gyre_status gyre_kv_pool_create(const gyre_device* device, const gyre_kv_pool_options* options,
                                gyre_kv_pool** pool) {
  return make(__func__, pool, "pool", [&] {
    return gyre::KvPool(deref(device, "device").value, kv_pool_options(options));
  });
}

void gyre_kv_pool_destroy(gyre_kv_pool* pool) { destroy(__func__, pool, "pool"); }

gyre_status gyre_kv_pool_describe(const gyre_kv_pool* pool, gyre_kv_pool_info* info) {
  return guard(__func__, [&] {
    const gyre::KvPoolInfo d = value(pool).describe();
    write(info,
          {.size = 0,
           .group_count = d.groups.size(),
           .bytes = d.bytes,
           .used_bytes = d.used_bytes,
           .sequences = d.sequences,
           .prefixes = d.prefixes,
           .evictions = d.evictions,
           .calibration = d.calibration},
          "info");
  });
}

gyre_status gyre_kv_pool_describe_group(gyre_kv_pool* pool, uint64_t group,
                                        gyre_kv_group_info* info) {
  return guard(__func__, [&] {
    gyre::KvPoolInfo described = value(pool).describe();
    if (group >= described.groups.size())
      refuse("there are ", described.groups.size(), " groups, got group ", group);
    const gyre::KvGroupInfo d = described.groups[group];
    const gyre::KvGroupInfo& kept = pool->described.keep(std::move(described.groups))[group];
    write(info,
          {.size = 0,
           .name = kept.name.c_str(),
           .layers = kept.layers.data(),
           .layer_count = kept.layers.size(),
           .page_bytes = d.page_bytes,
           .pages = d.pages,
           .used = d.used,
           .shared = d.shared,
           .cached = d.cached,
           .free = d.free},
          "info");
  });
}

gyre_status gyre_kv_pool_sequence(const gyre_kv_pool* pool, gyre_kv_sequence** sequence) {
  return make(__func__, sequence, "sequence", [&] { return value(pool).sequence(); });
}

gyre_status gyre_kv_pool_publish(const gyre_kv_pool* pool, const gyre_kv_sequence* sequence,
                                 const int32_t* tokens, uint64_t count) {
  return guard(__func__,
               [&] { value(pool).publish(value_of(sequence), token_list(tokens, count)); });
}

gyre_status gyre_kv_pool_match(const gyre_kv_pool* pool, const int32_t* tokens, uint64_t count,
                               gyre_kv_sequence** sequence) {
  return make(__func__, sequence, "sequence",
              [&] { return value(pool).match(token_list(tokens, count)); });
}

gyre_status gyre_kv_pool_forget(const gyre_kv_pool* pool) {
  return guard(__func__, [&] { value(pool).forget(); });
}

gyre_status gyre_kv_pool_export_page(const gyre_kv_pool* pool, const gyre_kv_sequence* sequence,
                                     uint64_t page, gyre_bytes** bytes) {
  return make(__func__, bytes, "bytes", [&] {
    const std::vector<std::byte> made = value(pool).export_page(value_of(sequence), page);
    return std::string(reinterpret_cast<const char*>(made.data()), made.size());
  });
}

gyre_status gyre_kv_pool_import_page(const gyre_kv_pool* pool, gyre_kv_sequence* sequence,
                                     const void* data, uint64_t bytes) {
  return guard(__func__, [&] {
    if (data == nullptr) refuse("data is NULL");
    value(pool).import_page(value_of(sequence), {static_cast<const std::byte*>(data), bytes});
  });
}

gyre_status gyre_kv_pool_save(const gyre_kv_pool* pool, const gyre_kv_sequence* sequence,
                              const char* path) {
  return guard(__func__, [&] { value(pool).save(value_of(sequence), &deref(path, "path")); });
}

gyre_status gyre_kv_pool_load(const gyre_kv_pool* pool, const char* path,
                              gyre_kv_sequence** sequence) {
  return make(__func__, sequence, "sequence",
              [&] { return value(pool).load(&deref(path, "path")); });
}

gyre_status gyre_kv_pool_save_prefixes(const gyre_kv_pool* pool, const char* path) {
  return guard(__func__, [&] { value(pool).save_prefixes(&deref(path, "path")); });
}

gyre_status gyre_kv_pool_load_prefixes(const gyre_kv_pool* pool, const char* path,
                                       uint64_t* pages) {
  return answer(__func__, pages, "pages",
                [&] { return value(pool).load_prefixes(&deref(path, "path")); });
}

void gyre_kv_sequence_destroy(gyre_kv_sequence* sequence) {
  destroy(__func__, sequence, "sequence");
}

gyre_status gyre_kv_sequence_length(const gyre_kv_sequence* sequence, uint64_t* tokens) {
  return answer(__func__, tokens, "tokens", [&] { return value_of(sequence).length(); });
}

gyre_status gyre_kv_sequence_fork(const gyre_kv_sequence* sequence, gyre_kv_sequence** fork) {
  return make(__func__, fork, "fork", [&] { return value_of(sequence).fork(); });
}

gyre_status gyre_kv_sequence_rollback(gyre_kv_sequence* sequence, uint64_t dropped_tokens) {
  return guard(__func__, [&] { value_of(sequence).rollback(dropped_tokens); });
}

gyre_status gyre_kv_sequence_clear(gyre_kv_sequence* sequence) {
  return guard(__func__, [&] { value_of(sequence).clear(); });
}
