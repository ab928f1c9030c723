#include "gyre/c/quantize.h"

#include "c_api/convert.h"
#include "c_api/enums.h"
#include "c_api/handles.h"
#include "c_api/structs.h"

using namespace gyre::c_api;

gyre_status gyre_kv_quantize(gyre_encoder* encoder, const gyre_kv_quantize_inputs* inputs,
                             const gyre_kv_range* options) {
  return record(__func__, encoder, inputs, [&](gyre::Encoder& to, const auto& given) {
    gyre::kv_quantize(
        to,
        {.k = tensor(given.k),
         .k_cache = kv_buffer(given.k_cache),
         .v = tensor(given.v),
         .v_cache = kv_buffer(given.v_cache),
         .k_calibration = kv_calibration(given.k_calibration, "inputs.k_calibration"),
         .v_calibration = kv_calibration(given.v_calibration, "inputs.v_calibration")},
        kv_range(options));
  });
}

gyre_status gyre_kv_dequantize(gyre_encoder* encoder, const gyre_kv_dequantize_inputs* inputs,
                               const gyre_kv_dequantize_options* options) {
  return record(__func__, encoder, inputs, [&](gyre::Encoder& to, const auto& given) {
    const gyre_kv_dequantize_options with = read_or_default(options, "options");
    gyre::kv_dequantize(
        to, {.cache = kv_buffer(given.cache), .out = tensor(given.out)},
        {.first_slot = with.first_slot,
         .domain = same_number(with.domain, {gyre::KvDomain::restored, gyre::KvDomain::rotated},
                               "options.domain")});
  });
}

gyre_status gyre_hadamard(gyre_encoder* encoder, const gyre_hadamard_inputs* inputs,
                          const gyre_hadamard_options* options) {
  using enum gyre::HadamardDirection;
  using enum gyre::HadamardSigns;
  return record(__func__, encoder, inputs, [&](gyre::Encoder& to, const auto& given) {
    const gyre_hadamard_options with = read_or_default(options, "options");
    gyre::hadamard(
        to, {.x = tensor(given.x), .out = tensor(given.out)},
        {.direction = same_number(with.direction, {forward, inverse}, "options.direction"),
         .signs = same_number(with.signs, {none, native, mlx_native}, "options.signs")});
  });
}

gyre_status gyre_supports_kv_quantize(const gyre_device* device, gyre_dtype source,
                                      gyre_kv_format format, int32_t* supported) {
  return answer(__func__, supported, "supported", [&] {
    return gyre::supports(deref(device, "device").value,
                          gyre::KvQuantizeTypes{.source = dtype(source, "source"),
                                                .format = kv_format(format, "format")});
  });
}
