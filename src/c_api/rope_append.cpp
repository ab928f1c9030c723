#include "gyre/c/rope_append.h"

#include "c_api/convert.h"
#include "c_api/handles.h"
#include "c_api/structs.h"

namespace gyre::c_api {

RopeAppendInputs rope_append_inputs(const gyre_rope_append_inputs* inputs) {
  const gyre_rope_append_inputs given = read(inputs, "inputs");
  return {.q = tensor(given.q),
          .q_out = tensor(given.q_out),
          .k = tensor(given.k),
          .v = tensor(given.v),
          .positions = tensor(given.positions),
          .q_weight = tensor(given.q_weight),
          .k_weight = tensor(given.k_weight),
          .frequencies = tensor(given.frequencies),
          .factors = tensor(given.factors)};
}

RopeAppendOptions rope_append_options(const gyre_rope_append_options* options) {
  const gyre_rope_append_options given = read_or_default(options, "options");
  RopeAppendOptions made;
  made.rope = rope_options(given.rope, given.no_rope, "options.rope");
  if (given.norm != nullptr) made.norm = rope_norm(given.norm, "options.norm");
  return made;
}

}  // namespace gyre::c_api

using namespace gyre::c_api;

gyre_status gyre_rope_append(gyre_encoder* encoder, const gyre_rope_append_inputs* inputs,
                             const gyre_kv_slots* to, const gyre_rope_append_options* options) {
  return guard(__func__, [&] {
    const gyre_kv_slots given = read(to, "to");
    gyre::rope_append(deref(encoder, "encoder").value, rope_append_inputs(inputs),
                      {.pages = deref(given.pages, "to.pages").value,
                       .slots = tensor(given.slots),
                       .k_calibration = kv_calibration(given.k_calibration, "to.k_calibration"),
                       .v_calibration = kv_calibration(given.v_calibration, "to.v_calibration")},
                      rope_append_options(options));
  });
}
