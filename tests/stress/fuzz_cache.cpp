// KvCache: its steps, copies and files, beside the length that it should have.
#include <algorithm>
#include <cstdio>
#include <fstream>

#include "stress/fuzz_world.h"

namespace gyre::test {
namespace {

void fuzz_make(FuzzWorld& w, FuzzInput& in) {
  KvCacheOptions options{.kv_heads = in.number(1 + in.below(2)),
                         .head_dim = w.head_dim(),
                         .v_head_dim = in.number(0),
                         .capacity = in.number(8 + in.below(40)),
                         .layers = {},
                         .step_tokens = in.number(1 + in.below(8))};
  w.add_layers(options);
  std::optional<KvCache> made;
  if (!w.call("KvCache", [&] { made.emplace(w.some_device(), options); })) return;
  expect(made->length() == 0, "a new cache is not empty");
  if (w.caches.size() > 3) w.caches.erase(w.caches.begin());
  w.caches.push_back({std::move(*made)});
  w.call("KvCache::length", [&] {
    made->length();  // NOLINT(bugprone-use-after-move): refused
    expect(false, "a cache that was moved from has a length");
  });
}

FuzzCache* some_cache(FuzzWorld& w) {
  if (w.caches.empty() || (w.caches.size() < 2 && w.in.chance(8))) fuzz_make(w, w.in);
  return w.caches.empty() ? nullptr : &w.caches[w.in.below(w.caches.size())];
}

void check(const FuzzCache& one) {
  expect(one.cache.length() == one.length, "a cache of " + std::to_string(one.cache.length()) +
                                               " tokens, of " + std::to_string(one.length) +
                                               " that it was given");
}

void begin_step(FuzzWorld& w, FuzzCache& one, uint64_t tokens) {
  if (w.call("KvCache::begin_step", [&] { one.cache.begin_step(w.some_encoder(), tokens); }))
    one.length += tokens;
  check(one);
}

void append(FuzzWorld& w, const FuzzCache& one, uint64_t layer, uint64_t tokens) {
  FuzzInput& in = w.in;
  const KvLayer& l = one.cache.layers()[layer];
  if (in.chance(3)) {
    const DType dtype = w.float_type();
    RopeAppendInputs inputs{.k = w.tensor(dtype, {tokens, l.kv_heads, l.head_dim}),
                            .v = w.tensor(dtype, {tokens, l.kv_heads, l.v_head_dim})};
    if (in.chance(2)) {
      inputs.q = w.tensor(dtype, {tokens, 2 * l.kv_heads, l.head_dim});
      inputs.q_out = inputs.q;
    }
    RopeAppendOptions options;
    if (in.chance(4)) options.norm = RopeNorm{};
    w.call("KvCache::rope_append",
           [&] { one.cache.rope_append(w.some_encoder(), in.number(layer), inputs, options); });
    return;
  }
  const Tensor k = w.floats({tokens, l.kv_heads, l.head_dim}),
               v = w.tensor(k.dtype(), {tokens, l.kv_heads, l.v_head_dim});
  w.call("KvCache::append", [&] { one.cache.append(w.some_encoder(), in.number(layer), k, v); });
}

void attend(FuzzWorld& w, const FuzzCache& one, uint64_t layer, uint64_t rows) {
  const FuzzWorld::Attend of = w.some_attend(one.cache.layers()[layer], rows);
  w.call("KvCache::attend",
         [&] { one.cache.attend(w.some_encoder(), w.in.number(layer), of.inputs, of.options); });
}

// A step as a model makes it, or one with something missing.
void fuzz_step(FuzzWorld& w, FuzzInput& in) {
  FuzzCache* const one = some_cache(w);
  if (one == nullptr) return;
  const KvCacheOptions& o = one->cache.options();
  const uint64_t tokens = in.number(1 + in.below(std::clamp<uint64_t>(o.step_tokens, 1, 8)));
  if (!in.chance(8)) begin_step(w, *one, tokens);
  if (tokens > 64) return;
  for (uint64_t layer = 0; layer < o.layers.size(); ++layer) {
    if (!in.chance(16)) append(w, *one, layer, tokens);
    if (in.chance(2)) attend(w, *one, layer, 1 + in.below(tokens == 0 ? 1 : tokens));
  }
  if (!in.chance(8)) w.submit();
}

void fuzz_cut(FuzzWorld& w, FuzzInput& in) {
  FuzzCache* const one = some_cache(w);
  if (one == nullptr) return;
  if (in.chance(6)) {
    if (w.call("KvCache::clear", [&] { one->cache.clear(w.some_encoder()); })) one->length = 0;
  } else {
    const uint64_t tokens = in.number(in.below(std::min<uint64_t>(one->length, 8) + 1));
    if (w.call("KvCache::rollback", [&] { one->cache.rollback(w.some_encoder(), tokens); }))
      one->length -= tokens;
  }
  check(*one);
}

// The next token's answer of a copy has the bits of its origin's.
void compare_fork(FuzzWorld& w, FuzzCache& one, FuzzCache& copy) {
  const std::vector<KvLayer>& layers = one.cache.layers();
  const auto rows = [&](const KvLayer& l, uint64_t dim) {
    return w.device.tensor(DType::f32, {1, l.kv_heads, dim});
  };
  const KvLayer& newest = layers.back();  // perhaps one that shares
  std::array outs = {rows(newest, newest.v_head_dim), rows(newest, newest.v_head_dim)};
  std::array<bool, 2> done{};
  size_t at = 0;
  for (FuzzCache* each : {&one, &copy}) {
    const Tensor& out = outs[at];
    bool all = w.call("KvCache::begin_step", [&] { each->cache.begin_step(w.encoder, 1); });
    each->length += all ? 1 : 0;
    for (uint64_t i = 0; i < layers.size(); ++i) {
      if (layers[i].kv_shared_layer_index) continue;
      const Tensor k = rows(layers[i], layers[i].head_dim),
                   v = rows(layers[i], layers[i].v_head_dim);
      all = w.call("KvCache::append", [&] { each->cache.append(w.encoder, i, k, v); }) && all;
    }
    done[at++] = w.call("KvCache::attend", [&] {
      const Tensor q = rows(newest, newest.head_dim);
      each->cache.attend(w.encoder, layers.size() - 1, {.q = q, .out = out});
    }) && all;
    done[at - 1] = w.submit() && done[at - 1];
  }
  if (!done[0] || !done[1]) return;
  expect(read_bytes(outs[0]) == read_bytes(outs[1]), "a copy answers otherwise than its origin");
  ++fuzz_stats().compared;
}

void fuzz_fork(FuzzWorld& w, FuzzInput& in) {
  FuzzCache* const one = some_cache(w);
  if (one == nullptr || w.caches.size() > 4) return;
  const uint64_t length = one->length,
                 capacity =
                     in.number(in.chance(2) ? 0 : one->cache.options().capacity + in.below(9));
  const bool compare = !in.spoiled();
  std::optional<KvCache> made;
  if (!w.call("KvCache::fork", [&] { made.emplace(one->cache.fork(w.some_encoder(), capacity)); }))
    return;
  FuzzCache copy{std::move(*made), length};
  check(copy);
  if (compare && !in.spoiled() && capacity == 0 && in.chance(2) && !w.heavy()) {
    if (w.submit()) compare_fork(w, *one, copy);
  }
  w.caches.push_back(std::move(copy));
}

void spoil_file(FuzzInput& in, const std::string& path) {
  std::fstream file(path, std::ios::binary | std::ios::in | std::ios::out);
  if (!file) return;
  file.seekg(0, std::ios::end);
  const auto size = static_cast<uint64_t>(file.tellg());
  if (size == 0) return;
  const auto at = static_cast<std::streamoff>(in.below(std::min<uint64_t>(size, 65536)));
  file.seekg(at);
  const int had = file.get();
  file.clear();
  file.seekp(at);
  file.put(static_cast<char>(had ^ (1 << in.below(8))));
}

void fuzz_files(FuzzWorld& w, FuzzInput& in) {
  FuzzCache* const one = some_cache(w);
  if (one == nullptr || !in.chance(4)) return;
  const std::string path = w.path();
  const bool regular = !in.spoiled();
  if (in.chance(2)) {
    if (w.call("KvCache::save", [&] { one->cache.save(path); })) w.saved[path] = one->length;
    check(*one);
    if (in.chance(2)) return;
  }
  const bool damage = regular && in.chance(4);
  if (damage) spoil_file(in, path);
  KvSnapshotInfo info;
  const bool inspected = w.call("inspect_snapshot", [&] { info = inspect_snapshot(path); });
  const bool verified = w.call("verify_snapshot", [&] { verify_snapshot(path); });
  const bool loaded = w.call("KvCache::load", [&] { one->cache.load(path); });
  if (damage) {
    expect(!verified && !loaded, "a damaged file was taken");
    std::remove(path.c_str());
    w.saved.erase(path);
  }
  if (inspected && !damage) {
    expect(verified && info.length == w.saved[path], "a file has another length than was saved");
    ++fuzz_stats().compared;
  }
  if (loaded) one->length = info.length;
  check(*one);
}

void fuzz_rest(FuzzWorld& w, FuzzInput& in) {
  FuzzCache* const one = some_cache(w);
  if (one == nullptr) return;
  switch (in.below(4)) {
    case 0:
      w.call("KvCache::positions", [&] { one->cache.positions(in.number(in.below(9))); });
      break;
    case 1:
      w.call("KvCache::describe", [&] {
        expect(one->cache.describe().size() == one->cache.options().layers.size(),
               "a layer is not described");
      });
      break;
    case 2:
      w.call("KvCache::bytes", [&] { one->cache.bytes(); });
      break;
    default:
      if (in.chance(8))
        w.call("KvCache::end_step", [&] {
          one->cache.end_step(in.chance(2) ? KvStepEnd::captured : KvStepEnd::checked);
        });
  }
  check(*one);
}

}  // namespace

std::span<const FuzzCall> fuzz_cache_calls() {
  static constexpr FuzzCall kCalls[] = {fuzz_make, fuzz_step, fuzz_step,  fuzz_step,
                                        fuzz_cut,  fuzz_fork, fuzz_files, fuzz_rest};
  return kCalls;
}

}  // namespace gyre::test
