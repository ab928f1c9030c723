#include "gyre/c/kv_batch.h"

#include <vector>

#include "c_api/convert.h"
#include "c_api/handles.h"
#include "c_api/scratch.h"

using namespace gyre::c_api;

namespace {

gyre::KvBatch& value(gyre_kv_batch* batch) { return deref(batch, "batch").value; }
const gyre::KvBatch& value(const gyre_kv_batch* batch) { return deref(batch, "batch").value; }

gyre::KvBatchOptions kv_batch_options(const gyre_kv_batch_options* options) {
  const gyre_kv_batch_options given = read_or_default(options, "options");
  gyre::KvBatchOptions made;
  made.max_sequences = or_default(given.max_sequences, made.max_sequences);
  made.max_tokens = or_default(given.max_tokens, made.max_tokens);
  made.max_query_length = given.max_query_length;
  made.max_kv_length = given.max_kv_length;
  return made;
}

}  // namespace

gyre_status gyre_kv_batch_create(const gyre_kv_pool* pool, const gyre_kv_batch_options* options,
                                 gyre_kv_batch** batch) {
  return make(__func__, batch, "batch",
              [&] { return gyre::KvBatch(deref(pool, "pool").value, kv_batch_options(options)); });
}

void gyre_kv_batch_destroy(gyre_kv_batch* batch) { destroy(__func__, batch, "batch"); }

gyre_status gyre_kv_batch_begin_step(gyre_kv_batch* batch, gyre_encoder* encoder,
                                     const gyre_kv_step* steps, uint64_t count) {
  return guard(__func__, [&] {
    std::vector<gyre::KvStep> made;
    const uint64_t limit = value(batch).options().max_sequences;
    for (const gyre_kv_step& step : read_array(steps, count, limit, "steps")) {
      made.push_back({.sequence = deref(step.sequence, "steps.sequence").value,
                      .tokens = step.tokens,
                      .is_prefill = step.is_prefill != 0});
    }
    value(batch).begin_step(value(encoder), made);
  });
}

gyre_status gyre_kv_batch_tokens(const gyre_kv_batch* batch, uint64_t* rows) {
  return answer(__func__, rows, "rows", [&] { return value(batch).tokens(); });
}

gyre_status gyre_kv_batch_positions(const gyre_kv_batch* batch, uint64_t rows,
                                    gyre_tensor** positions) {
  return make(__func__, positions, "positions", [&] { return value(batch).positions(rows); });
}

gyre_status gyre_kv_batch_append(gyre_kv_batch* batch, gyre_encoder* encoder, uint64_t layer,
                                 const gyre_tensor* k, const gyre_tensor* v) {
  return guard(__func__, [&] { value(batch).append(value(encoder), layer, tensor(k), tensor(v)); });
}

gyre_status gyre_kv_batch_rope_append(gyre_kv_batch* batch, gyre_encoder* encoder, uint64_t layer,
                                      const gyre_rope_append_inputs* inputs,
                                      const gyre_rope_append_options* options) {
  return guard(__func__, [&] {
    value(batch).rope_append(value(encoder), layer, rope_append_inputs(inputs),
                             rope_append_options(options));
  });
}

gyre_status gyre_kv_batch_attend(const gyre_kv_batch* batch, gyre_encoder* encoder, uint64_t layer,
                                 const gyre_attend_inputs* inputs,
                                 const gyre_attend_options* options) {
  return guard(__func__, [&] {
    AttendCall call(inputs);
    value(batch).attend(value(encoder), layer, call.in, attend_options(options));
    call.scratch.give_back();
  });
}

gyre_status gyre_kv_batch_record(gyre_kv_batch* batch) {
  return guard(__func__, [&] { value(batch).record(); });
}

gyre_status gyre_kv_batch_end_step(gyre_kv_batch* batch, gyre_step_end how) {
  return guard(__func__, [&] { value(batch).end_step(step_end(how)); });
}

gyre_status gyre_kv_batch_rollback(gyre_kv_batch* batch) {
  return guard(__func__, [&] { value(batch).rollback(); });
}
