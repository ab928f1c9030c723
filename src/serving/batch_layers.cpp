// What a batch records for one layer.
#include "gyre/write.h"
#include "runtime/require.h"
#include "serving/batch_state.h"

namespace gyre {

void KvBatch::append(Encoder& encoder, uint64_t layer, const Tensor& k, const Tensor& v) try {
  state().append("kv_batch.append", encoder, layer, k, [&](const KvSlots& to, bool /*first*/) {
    kv_write(encoder, {k, v, to.pages, to.slots, to.k_calibration, to.v_calibration});
  });
} catch (const std::bad_alloc&) {
  out_of_memory("kv_batch.append");
}

void KvBatch::rope_append(Encoder& encoder, uint64_t layer, const RopeAppendInputs& inputs,
                          const RopeAppendOptions& options) try {
  RopeAppendInputs in = inputs;
  const bool plain = options.rope && options.rope->mode == RopeMode::plain;
  const Tensor& step = state().tables.positions();
  state().append("kv_batch.rope_append", encoder, layer, in.k, [&](const KvSlots& to, bool first) {
    if (plain && !in.positions.defined()) in.positions = step.slice(0, 0, in.k.shape(0));
    if (!first) in.q = in.q_out = in.q_weight = {};
    gyre::rope_append(encoder, in, to, options);
  });
} catch (const std::bad_alloc&) {
  out_of_memory("kv_batch.rope_append");
}

}  // namespace gyre
