#include "gyre/c/rope.h"

#include <algorithm>
#include <span>

#include "c_api/convert.h"
#include "c_api/enums.h"
#include "c_api/handles.h"

namespace gyre::c_api {

std::optional<RopeOptions> rope_options(const gyre_rope_options* options, int32_t no_rope,
                                        const char* name) {
  using enum RopeMode;
  if (no_rope != 0) {
    if (options != nullptr) refuse(name, " is given, and no_rope is ", no_rope);
    return std::nullopt;
  }
  const gyre_rope_options given = read_or_default(options, name);
  const auto spans = {RopeSpan::rotary_dim, RopeSpan::head_dim};
  RopeOptions made;
  made.pairing = same_number(given.pairing, {RopePairing::split_half, RopePairing::adjacent}, name,
                             ".pairing");
  made.mode =
      same_number(given.mode, {plain, sectioned, vision, interleaved, vision_2d}, name, ".mode");
  if (given.rotary_dim != 0) made.rotary_dim = given.rotary_dim;
  made.partner = same_number(given.partner, spans, name, ".partner");
  made.exponent = same_number(given.exponent, spans, name, ".exponent");
  made.base = or_default(given.base, made.base);
  std::copy(std::begin(given.sections), std::end(given.sections), made.sections);
  made.magnitude = or_default(given.magnitude, made.magnitude);
  return made;
}

RopeNorm rope_norm(const gyre_rope_norm* norm, const char* name) {
  const gyre_rope_norm given = read_or_default(norm, name);
  RopeNorm made;
  if (given.has_epsilon != 0) made.epsilon = given.epsilon;
  made.weight_offset = given.weight_offset;
  return made;
}

}  // namespace gyre::c_api

using namespace gyre::c_api;

namespace {

gyre::RopeConfig rope_config(const gyre_rope_config* config) {
  using enum gyre::RopeType;
  const gyre_rope_config given = read(config, "config");
  gyre::RopeConfig made;
  made.rope_theta = or_default(given.rope_theta, made.rope_theta);
  made.rotary_dim = given.rotary_dim;
  made.rope_type = same_number(given.rope_type, {standard, linear, ntk, dynamic, yarn, llama3},
                               "config.rope_type");
  made.factor = or_default(given.factor, made.factor);
  made.original_max_position_embeddings = given.original_max_position_embeddings;
  made.seq_len = given.seq_len;
  made.low_freq_factor = or_default(given.low_freq_factor, made.low_freq_factor);
  made.high_freq_factor = or_default(given.high_freq_factor, made.high_freq_factor);
  made.beta_fast = or_default(given.beta_fast, made.beta_fast);
  made.beta_slow = or_default(given.beta_slow, made.beta_slow);
  if (given.attention_factor != 0) made.attention_factor = given.attention_factor;
  if (given.mscale != 0) made.mscale = given.mscale;
  if (given.mscale_all_dim != 0) made.mscale_all_dim = given.mscale_all_dim;
  made.truncate = given.no_truncate == 0;
  return made;
}

}  // namespace

gyre_status gyre_rope(gyre_encoder* encoder, const gyre_rope_inputs* inputs,
                      const gyre_rope_options* options) {
  return record(__func__, encoder, inputs, [&](gyre::Encoder& to, const auto& given) {
    gyre::rope(to,
               {.x = tensor(given.x),
                .positions = tensor(given.positions),
                .out = tensor(given.out),
                .k = tensor(given.k),
                .k_out = tensor(given.k_out),
                .frequencies = tensor(given.frequencies),
                .factors = tensor(given.factors)},
               *rope_options(options, 0, "options"));
  });
}

gyre_status gyre_norm_rope(gyre_encoder* encoder, const gyre_norm_rope_inputs* inputs,
                           const gyre_norm_rope_options* options) {
  return record(__func__, encoder, inputs, [&](gyre::Encoder& to, const auto& given) {
    const gyre_norm_rope_options with = read_or_default(options, "options");
    const gyre::RopeNorm norm = rope_norm(with.norm, "options.norm");
    gyre::norm_rope(to,
                    {.x = tensor(given.x),
                     .positions = tensor(given.positions),
                     .out = tensor(given.out),
                     .weight = tensor(given.weight),
                     .second = tensor(given.second),
                     .k = tensor(given.k),
                     .k_out = tensor(given.k_out),
                     .k_weight = tensor(given.k_weight),
                     .k_second = tensor(given.k_second),
                     .frequencies = tensor(given.frequencies),
                     .factors = tensor(given.factors)},
                    {.rope = rope_options(with.rope, with.no_rope, "options.rope"),
                     .epsilon = norm.epsilon,
                     .weight_offset = norm.weight_offset});
  });
}

gyre_status gyre_rope_frequencies(const gyre_rope_config* config, double* inverse, uint64_t count,
                                  double* attention_factor) {
  return guard(__func__, [&] {
    deref(inverse, "inverse");
    deref(attention_factor, "attention_factor");
    const gyre::RopeFrequencies made = gyre::rope_frequencies(rope_config(config));
    if (count != made.inverse.size())
      refuse("there are ", made.inverse.size(), " frequencies, count is ", count);
    std::copy(made.inverse.begin(), made.inverse.end(), inverse);
    *attention_factor = made.attention_factor;
  });
}

gyre_status gyre_rope_table(const gyre_device* device, const double* radians_per_position,
                            uint64_t count, gyre_tensor** table) {
  return make(__func__, table, "table", [&] {
    return gyre::rope_table(deref(device, "device").value,
                            std::span(&deref(radians_per_position, "radians_per_position"), count));
  });
}

gyre_status gyre_supports_rope(const gyre_device* device, gyre_dtype x, gyre_dtype out,
                               int32_t* supported) {
  return answer(__func__, supported, "supported", [&] {
    return gyre::supports(deref(device, "device").value,
                          gyre::RopeTypes{.x = dtype(x, "x"), .out = dtype(out, "out")});
  });
}
