#include "gyre/c/quantize.h"

#include "c_api/convert.h"
#include "c_api/enums.h"
#include "c_api/handles.h"
#include "c_api/structs.h"

using namespace gyre::c_api;

namespace {

gyre::KvRange kv_write_options(const gyre_kv_range* options) {
  const gyre_kv_range given = read_or_default(options, "options");
  gyre::KvRange made;
  made.position = given.position;
  made.cache =
      same_number(given.cache, {gyre::CacheKind::linear, gyre::CacheKind::ring}, "options.cache");
  made.source_begin = given.source_begin;
  if (given.has_tokens != 0) made.tokens = given.tokens;
  return made;
}

}  // namespace

gyre_status gyre_kv_copy(gyre_encoder* encoder, const gyre_kv_copy_inputs* inputs,
                         const gyre_kv_range* options) {
  return guard(__func__, [&] {
    const gyre_kv_copy_inputs given = read(inputs, "inputs");
    gyre::kv_copy(deref(encoder, "encoder").value,
                  {.k = tensor(given.k),
                   .k_cache = tensor(given.k_cache),
                   .v = tensor(given.v),
                   .v_cache = tensor(given.v_cache)},
                  kv_write_options(options));
  });
}

gyre_status gyre_kv_quantize(gyre_encoder* encoder, const gyre_kv_quantize_inputs* inputs,
                             const gyre_kv_range* options) {
  return guard(__func__, [&] {
    const gyre_kv_quantize_inputs given = read(inputs, "inputs");
    gyre::kv_quantize(
        deref(encoder, "encoder").value,
        {.k = tensor(given.k),
         .k_cache = kv_buffer(given.k_cache),
         .v = tensor(given.v),
         .v_cache = kv_buffer(given.v_cache),
         .k_calibration = kv_calibration(given.k_calibration, "inputs.k_calibration"),
         .v_calibration = kv_calibration(given.v_calibration, "inputs.v_calibration")},
        kv_write_options(options));
  });
}

gyre_status gyre_kv_dequantize(gyre_encoder* encoder, const gyre_kv_dequantize_inputs* inputs,
                               const gyre_kv_dequantize_options* options) {
  return guard(__func__, [&] {
    const gyre_kv_dequantize_inputs given = read(inputs, "inputs");
    const gyre_kv_dequantize_options with = read_or_default(options, "options");
    gyre::kv_dequantize(
        deref(encoder, "encoder").value,
        {.cache = kv_buffer(given.cache), .out = tensor(given.out)},
        {.first_slot = with.first_slot,
         .domain = same_number(with.domain, {gyre::KvDomain::restored, gyre::KvDomain::rotated},
                               "options.domain")});
  });
}

gyre_status gyre_hadamard(gyre_encoder* encoder, const gyre_hadamard_inputs* inputs,
                          const gyre_hadamard_options* options) {
  using enum gyre::HadamardDirection;
  using enum gyre::HadamardSigns;
  return guard(__func__, [&] {
    const gyre_hadamard_inputs given = read(inputs, "inputs");
    const gyre_hadamard_options with = read_or_default(options, "options");
    gyre::hadamard(
        deref(encoder, "encoder").value, {.x = tensor(given.x), .out = tensor(given.out)},
        {.direction = same_number(with.direction, {forward, inverse}, "options.direction"),
         .signs = same_number(with.signs, {none, native, mlx_native}, "options.signs")});
  });
}
