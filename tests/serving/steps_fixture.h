#pragma once
// Two batches of one pool, an encoder for each, and the calls of a step.
#include "serving/serving_fixture.h"

namespace gyre::test {

class StepsTest : public testing::TestWithParam<KvPoolOptions> {
 protected:
  void append_all(KvBatch& batch, Encoder& encoder, uint64_t rows) {
    for (uint64_t i = 0; i < layers; ++i) append(batch, encoder, i, rows);
  }
  void append(KvBatch& batch, Encoder& encoder, uint64_t layer, uint64_t rows) {
    const KvLayer& l = pool.layers()[layer];
    if (l.kv_shared_layer_index) return;
    batch.append(encoder, layer, device.tensor(DType::f32, {rows, l.kv_heads, l.head_dim}),
                 device.tensor(DType::f32, {rows, l.kv_heads, l.v_head_dim}));
  }
  void step(KvBatch& batch, Encoder& encoder, KvSequence& sequence, uint64_t tokens = 1) {
    batch.begin_step(encoder, {{sequence, tokens}});
    append_all(batch, encoder, tokens);
  }
  void run_step(KvBatch& batch, KvSequence& sequence, uint64_t tokens = 1) {
    step(batch, first, sequence, tokens);
    first.submit().wait();
  }
  // A step of `a` whose appends and attends come later.
  void begin_and_submit(uint64_t tokens) {
    one.begin_step(first, {{a, tokens}});
    first.submit();
  }

  Device device = Device::open("cpu", {.threads = 1});
  Server server{device, GetParam(), {.max_sequences = 4, .max_tokens = 40}};
  const KvPool& pool = server.pool;
  uint64_t layers = GetParam().layers.size();
  KvBatch& one = server.batch;
  KvBatch two{server.pool, {.max_sequences = 4, .max_tokens = 40}};
  Encoder &first = server.encoder, second{device};
  KvSequence a = pool.sequence(), b = pool.sequence();
};

}  // namespace gyre::test
