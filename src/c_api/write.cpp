#include "gyre/c/write.h"

#include "c_api/convert.h"
#include "c_api/enums.h"
#include "c_api/handles.h"
#include "c_api/structs.h"

namespace gyre::c_api {

KvRange kv_range(const gyre_kv_range* options) {
  const gyre_kv_range given = read_or_default(options, "options");
  KvRange made;
  made.position = given.position;
  made.cache = same_number(given.cache, {CacheKind::linear, CacheKind::ring}, "options.cache");
  made.source_begin = given.source_begin;
  if (given.has_tokens != 0) made.tokens = given.tokens;
  return made;
}

}  // namespace gyre::c_api

using namespace gyre::c_api;

gyre_status gyre_kv_copy(gyre_encoder* encoder, const gyre_kv_copy_inputs* inputs,
                         const gyre_kv_range* options) {
  return guard(__func__, [&] {
    const gyre_kv_copy_inputs given = read(inputs, "inputs");
    gyre::kv_copy(deref(encoder, "encoder").value,
                  {.k = tensor(given.k),
                   .k_cache = tensor(given.k_cache),
                   .v = tensor(given.v),
                   .v_cache = tensor(given.v_cache)},
                  kv_range(options));
  });
}

gyre_status gyre_supports_kv_copy(const gyre_device* device, gyre_dtype source, gyre_dtype cache,
                                  int32_t* supported) {
  return answer(__func__, supported, "supported", [&] {
    return gyre::supports(
        deref(device, "device").value,
        gyre::KvCopyTypes{.source = dtype(source, "source"), .cache = dtype(cache, "cache")});
  });
}

gyre_status gyre_kv_write(gyre_encoder* encoder, const gyre_kv_write_inputs* inputs) {
  return guard(__func__, [&] {
    const gyre_kv_write_inputs given = read(inputs, "inputs");
    gyre::kv_write(deref(encoder, "encoder").value,
                   {.k = tensor(given.k),
                    .v = tensor(given.v),
                    .pages = kv_pages(given.pages),
                    .slots = tensor(given.slots),
                    .k_calibration = kv_calibration(given.k_calibration, "inputs.k_calibration"),
                    .v_calibration = kv_calibration(given.v_calibration, "inputs.v_calibration")});
  });
}
