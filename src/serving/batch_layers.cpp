// What a batch records for one layer.
#include "runtime/require.h"
#include "serving/batch_state.h"

namespace gyre {

void KvBatch::append(Encoder& encoder, uint64_t layer, const Tensor& k, const Tensor& v) {
  constexpr const char* kOp = "kv_batch.append";
  State& s = state();
  s.step.check_append(kOp, layer);
  s.check_rows(kOp, "k", k);
  const KvPool::State::Layer& l = s.layer(layer);
  const auto write = [&](const KvPool::State::Store& store) {
    const Tensor slots = s.tables.group(store.group).slots.slice(0, 0, k.shape(0));
    kv_write(encoder, {k, v, store.pages, slots});
  };
  write(l.body);
  if (l.tail) write(*l.tail);
  if (l.sinks) write(*l.sinks);
  s.note(encoder, kOp, s.pool->order->append_note(s.number, s.current, layer));
  s.step.note_append(layer);
  if (s.step.complete()) s.finish();
}

}  // namespace gyre
