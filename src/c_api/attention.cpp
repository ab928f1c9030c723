#include "gyre/c/attention.h"

#include <optional>

#include "c_api/convert.h"
#include "c_api/handles.h"
#include "c_api/scratch.h"

namespace gyre::c_api {
namespace {

AttentionMask attention_mask(const gyre_attention_mask* mask) {
  const gyre_attention_mask given = read_or_default(mask, "mask");
  return {.causal = given.not_causal == 0,
          .window = given.window,
          .soft_cap = given.soft_cap,
          .alibi_slopes = tensor(given.alibi_slopes),
          .tree_mask = tensor(given.tree_mask),
          .sink_logits = tensor(given.sink_logits)};
}

std::optional<float> scale_of(float given) {
  return given != 0 ? std::optional(given) : std::nullopt;
}

}  // namespace

AttendOptions attend_options(const gyre_attend_options* options) {
  const gyre_attend_options given = read_or_default(options, "options");
  return {.scale = scale_of(given.scale), .mask = attention_mask(given.mask)};
}

}  // namespace gyre::c_api

using namespace gyre::c_api;

namespace {

gyre::AttentionOptions attention_options(const gyre_attention_options* options) {
  const gyre_attention_options given = read_or_default(options, "options");
  return {.length = given.length,
          .ring_start = given.ring_start,
          .scale = scale_of(given.scale),
          .mask = attention_mask(given.mask)};
}

gyre::PagedAttentionOptions paged_options(const gyre_paged_attention_options* options) {
  const gyre_paged_attention_options given = read_or_default(options, "options");
  return {.max_query_length = or_default(given.max_query_length, uint64_t{1}),
          .min_query_length = or_default(given.min_query_length, uint64_t{1}),
          .max_kv_length = given.max_kv_length,
          .scale = scale_of(given.scale),
          .mask = attention_mask(given.mask),
          .settled_keys = given.settled_keys != 0};
}

}  // namespace

gyre_status gyre_attention(gyre_encoder* encoder, const gyre_attention_inputs* inputs,
                           const gyre_attention_options* options) {
  return record(__func__, encoder, inputs, [&](gyre::Encoder& to, const auto& given) {
    Scratch scratch(given.scratch);
    gyre::attention(to,
                    gyre::AttentionInputs{.q = tensor(given.q),
                                          .k_cache = kv_buffer(given.k_cache),
                                          .v_cache = kv_buffer(given.v_cache),
                                          .out = tensor(given.out),
                                          .lse = tensor(given.lse),
                                          .latent = given.latent != 0,
                                          .scratch = scratch.memory()},
                    attention_options(options));
    scratch.give_back();
  });
}

gyre_status gyre_paged_attention(gyre_encoder* encoder, const gyre_paged_attention_inputs* inputs,
                                 const gyre_paged_attention_options* options) {
  return record(__func__, encoder, inputs, [&](gyre::Encoder& to, const auto& given) {
    Scratch scratch(given.scratch);
    gyre::attention(to,
                    gyre::PagedAttentionInputs{.q = tensor(given.q),
                                               .pages = kv_pages(given.pages),
                                               .page_table = tensor(given.page_table),
                                               .kv_lengths = tensor(given.kv_lengths),
                                               .cu_seqlens_q = tensor(given.cu_seqlens_q),
                                               .is_prefill = tensor(given.is_prefill),
                                               .out = tensor(given.out),
                                               .lse = tensor(given.lse),
                                               .scratch = scratch.memory(),
                                               .schedule = tensor(given.schedule)},
                    paged_options(options));
    scratch.give_back();
  });
}

gyre_status gyre_attention_schedule(gyre_encoder* encoder,
                                    const gyre_attention_schedule_inputs* inputs,
                                    const gyre_paged_attention_options* options,
                                    gyre_tensor** schedule) {
  return record(__func__, encoder, inputs, [&](gyre::Encoder& to, const auto& given) {
    Scratch memory(&deref(schedule, "schedule"));  // refuses NULL
    *memory.memory() = gyre::attention_schedule(to,
                                                {.pages = kv_pages(given.pages),
                                                 .tokens = given.tokens,
                                                 .heads = given.heads,
                                                 .q_dtype = dtype(given.q_dtype, "inputs.q_dtype"),
                                                 .kv_lengths = tensor(given.kv_lengths),
                                                 .cu_seqlens_q = tensor(given.cu_seqlens_q),
                                                 .is_prefill = tensor(given.is_prefill)},
                                                paged_options(options), *memory.memory());
    memory.give_back();
  });
}

gyre_status gyre_attention_partial(gyre_encoder* encoder,
                                   const gyre_attention_partial_inputs* inputs,
                                   const gyre_attention_options* options) {
  return record(__func__, encoder, inputs, [&](gyre::Encoder& to, const auto& given) {
    gyre::attention_partial(to,
                            {.q = tensor(given.q),
                             .k_cache = kv_buffer(given.k_cache),
                             .v_cache = kv_buffer(given.v_cache),
                             .partial = tensor(given.partial),
                             .latent = given.latent != 0},
                            attention_options(options));
  });
}

gyre_status gyre_attention_merge(gyre_encoder* encoder, const gyre_attention_merge_inputs* inputs) {
  return record(__func__, encoder, inputs, [&](gyre::Encoder& to, const auto& given) {
    gyre::attention_merge(to, {.partial = tensor(given.partial),
                               .out = tensor(given.out),
                               .lse = tensor(given.lse),
                               .sink_logits = tensor(given.sink_logits)});
  });
}

gyre_status gyre_supports_attention(const gyre_device* device, const gyre_attention_types* types,
                                    int32_t* supported) {
  return answer(__func__, supported, "supported", [&] {
    const gyre_attention_types given = read(types, "types");
    const gyre::AttentionTypes otherwise;
    return gyre::supports(
        deref(device, "device").value,
        gyre::AttentionTypes{.q = dtype_or(given.q, otherwise.q, "types.q"),
                             .k = kv_format_or(given.k, otherwise.k, "types.k"),
                             .v = kv_format_or(given.v, otherwise.v, "types.v"),
                             .out = dtype_or(given.out, otherwise.out, "types.out"),
                             .paged = given.paged != 0,
                             .latent = given.latent != 0});
  });
}
