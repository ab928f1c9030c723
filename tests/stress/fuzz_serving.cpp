// KvPool, KvSequence and KvBatch, beside the lengths that sequences should have.
#include <algorithm>

#include "stress/fuzz_world.h"

namespace gyre::test {
namespace {

void fuzz_make(FuzzWorld& w, FuzzInput& in) {
  KvPoolOptions options{.kv_heads = in.number(1 + in.below(2)),
                        .head_dim = w.head_dim(),
                        .v_head_dim = in.number(0),
                        .layers = {},
                        .pages = in.number(8 + in.below(24)),
                        .page_tokens = in.number(8 * (1 + in.below(2))),
                        .sequences = in.number(1 + in.below(6)),
                        .step_tokens = in.number(8 + in.below(24))};
  w.add_layers(options);
  std::optional<KvPool> pool;
  if (!w.call("KvPool", [&] { pool.emplace(w.some_device(), options); })) return;
  const KvBatchOptions bounds{in.number(1 + in.below(4)), in.number(8 + in.below(24)), in.number(0),
                              in.number(0)};
  std::optional<KvBatch> batch;
  if (!w.call("KvBatch", [&] { batch.emplace(*pool, bounds); })) return;
  if (w.servers.size() > 1) w.servers.erase(w.servers.begin());
  w.servers.push_back({*pool, std::move(*batch)});
  w.call("KvBatch::tokens", [&] {
    batch->tokens();  // NOLINT(bugprone-use-after-move): refused
    expect(false, "a batch that was moved from has tokens");
  });
}

FuzzServer* some_server(FuzzWorld& w) {
  if (w.servers.empty()) fuzz_make(w, w.in);
  return w.servers.empty() ? nullptr : &w.servers[w.in.below(w.servers.size())];
}

void check(const FuzzServer& server) {
  for (const FuzzSequence& one : server.sequences)
    expect(one.sequence.length() == one.length,
           "a sequence of " + std::to_string(one.sequence.length()) + " tokens, of " +
               std::to_string(one.length) + " that it was given");
  const KvPoolInfo info = server.pool.describe();
  // The batch holds those of its step.
  const uint64_t live = server.sequences.size();
  expect(info.sequences >= live && info.sequences <= live + server.batch.options().max_sequences,
         "a pool counts other sequences than there are");
  for (const KvGroupInfo& group : info.groups)
    expect(group.used + group.cached + group.free == group.pages, "a page is lost");
  ++fuzz_stats().compared;
}

void put(FuzzWorld& w, FuzzServer& server, FuzzSequence made) {
  if (server.sequences.size() < 6) {
    server.sequences.push_back(std::move(made));
  } else {
    server.sequences[w.in.below(6)] = std::move(made);
  }
}

// One of its own, or of another pool.
FuzzSequence* some_sequence(FuzzWorld& w, FuzzServer& server) {
  FuzzInput& in = w.in;
  if (server.sequences.empty()) {
    std::optional<KvSequence> made;
    if (!w.call("KvPool::sequence", [&] { made.emplace(server.pool.sequence()); })) return nullptr;
    put(w, server, {std::move(*made)});
  }
  FuzzServer& from = in.spoil() ? w.servers[in.below(w.servers.size())] : server;
  return from.sequences.empty() ? nullptr : &from.sequences[in.below(from.sequences.size())];
}

std::vector<int32_t> some_tokens(FuzzInput& in, uint64_t count) {
  std::vector<int32_t> tokens(count);
  const auto kind = static_cast<int32_t>(in.below(3));
  for (size_t i = 0; i < count; ++i) tokens[i] = kind * 1000 + static_cast<int32_t>(i);
  return tokens;
}

bool begin(FuzzWorld& w, FuzzServer& server) {
  FuzzInput& in = w.in;
  std::vector<KvStep> steps;
  std::vector<FuzzSequence*> order;
  for (uint64_t i = in.number(1 + in.below(2)) % 8; i != 0; --i) {
    FuzzSequence* const one = some_sequence(w, server);
    if (one == nullptr) return false;
    order.push_back(one);
  }
  for (FuzzSequence* one : order)
    steps.push_back({one->sequence, in.number(1 + in.below(8)), in.chance(2)});
  if (!w.call("KvBatch::begin_step", [&] { server.batch.begin_step(w.some_encoder(), steps); }))
    return false;
  for (size_t i = 0; i < steps.size(); ++i) order[i]->length += steps[i].tokens;
  return true;
}

void append(FuzzWorld& w, FuzzServer& server, uint64_t layer, uint64_t rows) {
  FuzzInput& in = w.in;
  const KvLayer& l = server.pool.layers()[layer];
  const DType dtype = w.float_type();
  const Tensor k = w.tensor(dtype, {rows, l.kv_heads, l.head_dim}),
               v = w.tensor(dtype, {rows, l.kv_heads, l.v_head_dim});
  if (in.chance(3)) {
    const RopeAppendInputs inputs{.k = k, .v = v};
    w.call("KvBatch::rope_append",
           [&] { server.batch.rope_append(w.some_encoder(), in.number(layer), inputs); });
  } else {
    w.call("KvBatch::append",
           [&] { server.batch.append(w.some_encoder(), in.number(layer), k, v); });
  }
}

void attend(FuzzWorld& w, const FuzzServer& server, uint64_t layer, uint64_t rows) {
  const FuzzWorld::Attend of = w.some_attend(server.pool.layers()[layer], rows);
  w.call("KvBatch::attend",
         [&] { server.batch.attend(w.some_encoder(), w.in.number(layer), of.inputs, of.options); });
}

void layers_of_step(FuzzWorld& w, FuzzServer& server, uint64_t rows) {
  FuzzInput& in = w.in;
  for (uint64_t layer = 0; layer < server.pool.options().layers.size(); ++layer) {
    if (!in.chance(16)) append(w, server, layer, rows);
    if (in.chance(2)) attend(w, server, layer, rows);
  }
}

void fuzz_step(FuzzWorld& w, FuzzInput& in) {
  FuzzServer* const server = some_server(w);
  if (server == nullptr) return;
  begin(w, *server);
  uint64_t rows = 0;
  w.call("KvBatch::tokens", [&] { rows = server->batch.tokens(); });
  rows = in.number(rows);
  if (rows > 64) return;
  layers_of_step(w, *server, rows);
  if (!in.chance(8)) w.submit();
  check(*server);
}

// The lengths of what a step had are known again only by asking.
void relearn(FuzzServer& server) {
  for (FuzzSequence& one : server.sequences) one.length = one.sequence.length();
}

void fuzz_recording(FuzzWorld& w, FuzzInput& in) {
  FuzzServer* const server = some_server(w);
  if (server == nullptr) return;
  switch (in.below(5)) {
    case 0:
      if (w.call("KvBatch::record", [&] { server->batch.record(); }))
        layers_of_step(w, *server, 1 + in.below(8));
      break;
    case 1:
      w.call("KvBatch::end_step", [&] { server->batch.end_step(); });
      break;
    case 2:
      if (w.call("KvBatch::rollback", [&] { server->batch.rollback(); })) {
        for (FuzzServer& each : w.servers) {
          for (const FuzzSequence& one : each.sequences)
            expect(one.sequence.length() <= one.length, "a cancelled step made a sequence longer");
          relearn(each);
        }
      }
      break;
    case 3:
      if (in.chance(8))
        w.call("KvBatch::end_step", [&] { server->batch.end_step(KvStepEnd::captured); });
      break;
    default:
      w.call("KvBatch::positions", [&] { server->batch.positions(in.number(in.below(9))); });
  }
  check(*server);
}

void fuzz_sequences(FuzzWorld& w, FuzzInput& in) {
  FuzzServer* const server = some_server(w);
  if (server == nullptr) return;
  FuzzSequence* const one = some_sequence(w, *server);
  if (one == nullptr) return;
  std::optional<KvSequence> made;
  switch (in.below(6)) {
    case 0:
      if (w.call("KvSequence::fork", [&] { made.emplace(one->sequence.fork()); })) {
        // A fork belongs to the pool of its origin.
        for (FuzzServer& each : w.servers) {
          const FuzzSequence* const first = each.sequences.data();
          if (one < first || one >= first + each.sequences.size()) continue;
          const uint64_t length = one->length;
          put(w, each, {std::move(*made), length});
          break;
        }
      }
      break;
    case 1: {
      const uint64_t tokens = in.number(in.below(std::min<uint64_t>(one->length, 8) + 1));
      if (w.call("KvSequence::rollback", [&] { one->sequence.rollback(tokens); }))
        one->length -= tokens;
      break;
    }
    case 2:
      if (w.call("KvSequence::clear", [&] { one->sequence.clear(); })) one->length = 0;
      break;
    case 3:
      if (w.call("KvPool::sequence", [&] { made.emplace(server->pool.sequence()); }))
        put(w, *server, {std::move(*made)});
      break;
    case 4: {
      KvSequence taken = std::move(one->sequence);
      w.call("KvSequence::length", [&] { one->sequence.length(); });
      w.call("KvSequence::fork", [&] { one->sequence.fork(); });
      w.call("KvPool::publish", [&] { server->pool.publish(one->sequence, some_tokens(in, 3)); });
      one->sequence = std::move(taken);
      break;
    }
    default:
      if (server->sequences.size() > 1) server->sequences.pop_back();
  }
  check(*server);
}

void fuzz_prefixes(FuzzWorld& w, FuzzInput& in) {
  FuzzServer* const server = some_server(w);
  if (server == nullptr) return;
  const FuzzSequence* const one = some_sequence(w, *server);
  if (one == nullptr) return;
  switch (in.below(4)) {
    case 0:
    case 1: {
      const std::vector<int32_t> tokens =
          some_tokens(in, std::min<uint64_t>(in.number(one->length), 200));
      w.call("KvPool::publish", [&] { server->pool.publish(one->sequence, tokens); });
      break;
    }
    case 2: {
      const std::vector<int32_t> tokens = some_tokens(in, in.below(60));
      std::optional<KvSequence> made;
      if (!w.call("KvPool::match", [&] { made.emplace(server->pool.match(tokens)); })) break;
      const uint64_t length = made->length();
      expect(length <= tokens.size() && length % server->pool.options().page_tokens == 0,
             "a prefix that is not whole pages of its tokens");
      put(w, *server, {std::move(*made), length});
      break;
    }
    default:
      if (in.chance(4)) w.call("KvPool::forget", [&] { server->pool.forget(); });
  }
  check(*server);
}

void fuzz_pages(FuzzWorld& w, FuzzInput& in) {
  FuzzServer* const server = some_server(w);
  if (server == nullptr) return;
  FuzzSequence* const one = some_sequence(w, *server);
  if (one == nullptr) return;
  if (in.chance(2)) {
    w.call("KvPool::export_page", [&] {
      server->page = server->pool.export_page(one->sequence, in.number(in.chance(4) ? 1 : 0));
    });
    return;
  }
  std::optional<KvSequence> fresh;
  if (!in.spoiled() && in.chance(2) &&
      w.call("KvPool::sequence", [&] { fresh.emplace(server->pool.sequence()); })) {
    *one = {std::move(*fresh), 0};  // pages come from the first on
  }
  std::vector<std::byte> page = w.servers[in.below(w.servers.size())].page;
  bool damaged = false;
  if (!page.empty() && in.spoil()) {
    page[in.below(page.size() > 65536 ? 65536 : page.size())] ^=
        static_cast<std::byte>(1 << in.below(8));
    damaged = true;
  }
  if (w.call("KvPool::import_page", [&] { server->pool.import_page(one->sequence, page); })) {
    expect(!damaged, "a damaged page was taken");
    const uint64_t length = one->sequence.length();
    expect(length > one->length && length - one->length <= server->pool.options().page_tokens,
           "an imported page has other tokens than a page");
    one->length = length;
  }
  check(*server);
}

void fuzz_files(FuzzWorld& w, FuzzInput& in) {
  FuzzServer* const server = some_server(w);
  if (server == nullptr || !in.chance(4)) return;
  const FuzzSequence* const one = some_sequence(w, *server);
  if (one == nullptr) return;
  const std::string path = w.path();
  std::optional<KvSequence> made;
  switch (in.below(4)) {
    case 0:
      if (w.call("KvPool::save", [&] { server->pool.save(one->sequence, path); }) &&
          w.call("KvPool::load", [&] { made.emplace(server->pool.load(path)); })) {
        if (!in.spoiled())
          expect(made->length() == one->length, "a saved sequence has another length");
        const uint64_t length = made->length();
        put(w, *server, {std::move(*made), length});
      }
      break;
    case 1:
      if (w.call("KvPool::load", [&] { made.emplace(server->pool.load(path)); })) {
        const uint64_t length = made->length();
        put(w, *server, {std::move(*made), length});
      }
      break;
    case 2:
      w.call("KvPool::save_prefixes", [&] { server->pool.save_prefixes(path); });
      break;
    default:
      w.call("KvPool::load_prefixes", [&] { server->pool.load_prefixes(path); });
  }
  check(*server);
}

}  // namespace

std::span<const FuzzCall> fuzz_serving_calls() {
  static constexpr FuzzCall kCalls[] = {fuzz_make,     fuzz_step,      fuzz_step,
                                        fuzz_step,     fuzz_recording, fuzz_sequences,
                                        fuzz_prefixes, fuzz_pages,     fuzz_files};
  return kCalls;
}

}  // namespace gyre::test
