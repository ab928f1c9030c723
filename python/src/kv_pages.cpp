#include "kv_pages.h"

#include "kv_calibration.h"

namespace gyre::python {
namespace {

KvPageShape shape_of(const std::string& k, const std::string& v, uint64_t kv_heads,
                     uint64_t head_dim, uint64_t v_head_dim, uint64_t page_tokens, bool latent) {
  return {.k = kv_format(k),
          .v = kv_format(v),
          .kv_heads = kv_heads,
          .head_dim = head_dim,
          .v_head_dim = v_head_dim,
          .page_tokens = page_tokens,
          .latent = latent};
}

std::string repr(const BoundKvPages& self) {
  const KvPageShape& shape = self.pages.shape;
  std::ostringstream text = plain_text();
  text << "gyre.KvPages(" << self.pages.bytes.shape(0) << " pages of " << shape.page_tokens
       << " tokens, k=" << name(shape.k) << ", v=" << name(shape.v)
       << ", kv_heads=" << shape.kv_heads << ", head_dim=" << shape.head_dim
       << (shape.latent ? ", latent=True" : "") << ", device=" << self.device.info().name << ")";
  return text.str();
}

Operand record_attention(Encoder& encoder, const Operand& q, const BoundKvPages& pages,
                         const Operand& page_table, const Operand& kv_lengths,
                         const Operand& cu_seqlens_q, const OptionalOperand& out,
                         const OptionalOperand& is_prefill, const OptionalOperand& lse,
                         const OptionalOperand& sink_logits, const OptionalOperand& alibi_slopes,
                         const OptionalOperand& schedule, uint64_t max_query_length,
                         uint64_t min_query_length, uint64_t max_kv_length,
                         std::optional<float> scale, bool causal, uint64_t window, float soft_cap,
                         bool settled_keys, BoundScratch* scratch) {
  const Operands operand(encoder, "paged_attention");
  const UsedScratch memory(scratch, "paged_attention");
  const Tensor queries = operand("q", q);
  const KvPageShape& shape = pages.pages.shape;
  const bool k_dim = shape.latent || shape.v_head_dim == 0;
  const Written to = operand.written(
      "out", out, queries.dtype(),
      queries.rank() == 3
          ? Dims{queries.shape(0), queries.shape(1), k_dim ? shape.head_dim : shape.v_head_dim}
          : Dims{});
  const PagedAttentionInputs inputs{.q = queries,
                                    .pages = pages.pages,
                                    .page_table = operand("page_table", page_table),
                                    .kv_lengths = operand("kv_lengths", kv_lengths),
                                    .cu_seqlens_q = operand("cu_seqlens_q", cu_seqlens_q),
                                    .is_prefill = operand("is_prefill", is_prefill),
                                    .out = to.tensor,
                                    .lse = operand("lse", lse),
                                    .scratch = memory.tensor(),
                                    .schedule = operand("schedule", schedule)};
  const PagedAttentionOptions options{
      .max_query_length = max_query_length,
      .min_query_length = min_query_length,
      .max_kv_length = max_kv_length,
      .scale = scale,
      .mask = {.causal = causal,
               .window = window,
               .soft_cap = soft_cap,
               .alibi_slopes = operand("alibi_slopes", alibi_slopes),
               .sink_logits = operand("sink_logits", sink_logits)},
      .settled_keys = settled_keys};
  without_gil([&] { attention(encoder, inputs, options); });
  return to.result;
}

// None where the device's kernels read no schedule.
std::optional<BoundTensor> record_schedule(Encoder& encoder, const BoundKvPages& pages,
                                           const Operand& kv_lengths, const Operand& cu_seqlens_q,
                                           const OptionalOperand& is_prefill, uint64_t tokens,
                                           uint64_t heads, const std::string& q_dtype,
                                           uint64_t max_query_length, uint64_t min_query_length,
                                           uint64_t max_kv_length, bool causal, uint64_t window,
                                           const OptionalOperand& memory) {
  const Operands operand(encoder, "attention_schedule");
  const AttentionScheduleInputs inputs{.pages = pages.pages,
                                       .tokens = tokens,
                                       .heads = heads,
                                       .q_dtype = dtype_named(q_dtype),
                                       .kv_lengths = operand("kv_lengths", kv_lengths),
                                       .cu_seqlens_q = operand("cu_seqlens_q", cu_seqlens_q),
                                       .is_prefill = operand("is_prefill", is_prefill)};
  const PagedAttentionOptions options{.max_query_length = max_query_length,
                                      .min_query_length = min_query_length,
                                      .max_kv_length = max_kv_length,
                                      .mask = {.causal = causal, .window = window}};
  Tensor schedule = operand("memory", memory);
  without_gil([&] { schedule = attention_schedule(encoder, inputs, options, schedule); });
  if (!schedule.defined()) return std::nullopt;
  return BoundTensor{pages.device, std::move(schedule)};
}

void bind_pages(nb::module_& module) {
  nb::class_<BoundKvPages>(
      module, "KvPages",
      "Pages of one layer. A page holds K and V of page_tokens tokens, KV head after KV head, in "
      "Gyre's memory or in the caller's.")
      .def(
          "__init__",
          [](BoundKvPages* self, const DeviceLike& device, const std::string& k,
             const std::string& v, uint64_t kv_heads, uint64_t head_dim, uint64_t v_head_dim,
             uint64_t page_tokens, const std::optional<uint64_t>& pages,
             const OptionalOperand& memory, bool latent) {
            Device home = device_of(device);
            const KvPageShape shape =
                shape_of(k, v, kv_heads, head_dim, v_head_dim, page_tokens, latent);
            if (pages.has_value() == memory.has_value())
              refuse("KvPages: either pages or memory must be given");
            if (pages) {
              new (self) BoundKvPages{home, KvPages::allocate(home, shape, *pages)};
              return;
            }
            const Encoder encoder(home);
            Tensor bytes = Operands(encoder, "KvPages")("memory", *memory);
            new (self) BoundKvPages{home, {shape, std::move(bytes)}};
          },
          "device"_a = "cpu", nb::kw_only(), "k"_a = "tq8", "v"_a = "tq4", "kv_heads"_a,
          "head_dim"_a, "v_head_dim"_a = 0, "page_tokens"_a = 64, "pages"_a = nb::none(),
          "memory"_a = nb::none(), "latent"_a = false,
          "Give either pages, the number of pages to allocate, or memory, which is u8 [pages, "
          "kv_page_bytes(...)] with pages any multiple of 16 bytes apart. With latent (MLA), k is "
          "the latent, which is V as well, and v the rotary part of K; kv_heads is 1.")
      .def_prop_ro(
          "memory",
          [](const BoundKvPages& self) {
            return BoundTensor{self.device, self.pages.bytes};
          },
          "The pages as a tensor: u8 [pages, kv_page_bytes(...)].")
      .def_prop_ro(
          "pages", [](const BoundKvPages& self) { return self.pages.bytes.shape(0); },
          "The number of pages.")
      .def_prop_ro(
          "page_tokens", [](const BoundKvPages& self) { return self.pages.shape.page_tokens; },
          "The number of tokens of a page.")
      .def("__repr__", repr);

  module.def(
      "kv_page_bytes",
      [](const std::string& k, const std::string& v, uint64_t kv_heads, uint64_t head_dim,
         uint64_t v_head_dim, uint64_t page_tokens, bool latent) {
        return kv_page_bytes(shape_of(k, v, kv_heads, head_dim, v_head_dim, page_tokens, latent));
      },
      nb::kw_only(), "k"_a = "tq8", "v"_a = "tq4", "kv_heads"_a, "head_dim"_a, "v_head_dim"_a = 0,
      "page_tokens"_a = 64, "latent"_a = false,
      "Returns the bytes of a page of one layer, a multiple of 16.");
}

}  // namespace

void bind_kv_pages(nb::module_& module) {
  bind_pages(module);
  module.def(
      "kv_write",
      [](Encoder& encoder, const Operand& k, const Operand& v, const BoundKvPages& pages,
         const Operand& slots, const std::optional<KvCalibration>& k_calibration,
         const std::optional<KvCalibration>& v_calibration) {
        const Operands operand(encoder, "kv_write");
        const KvWriteInputs inputs{.k = operand("k", k),
                                   .v = operand("v", v),
                                   .pages = pages.pages,
                                   .slots = operand("slots", slots),
                                   .k_calibration = calibration_or_none(k_calibration),
                                   .v_calibration = calibration_or_none(v_calibration)};
        without_gil([&] { kv_write(encoder, inputs); });
      },
      "encoder"_a, "k"_a, "v"_a, "pages"_a, "slots"_a, nb::kw_only(),
      "k_calibration"_a = nb::none(), "v_calibration"_a = nb::none(),
      "Writes tokens to slots of pages.\n\n"
      "k and v are [tokens, kv_heads, head_dim], f32, f16 or bf16. slots is i64 or i32 [tokens] "
      "and holds page * page_tokens + offset, in any order; negative slots and slots outside the "
      "pages are skipped.");
  module.def(
      "kv_page_copy",
      [](Encoder& encoder, const BoundKvPages& pages, const Operand& from, const Operand& to) {
        const Operands operand(encoder, "kv_page_copy");
        const KvPageCopyInputs inputs{
            .pages = pages.pages, .from = operand("from", from), .to = operand("to", to)};
        without_gil([&] { kv_page_copy(encoder, inputs); });
      },
      "encoder"_a, "pages"_a, "from_"_a, "to"_a,
      "Copies whole pages. from_ and to are i32 [count] and hold page numbers.");
  nb::class_<BoundScratch>(
      module, "AttentionScratch",
      "Memory that calls of attention, paged_attention and KvCache.attend share. It grows as "
      "needed; "
      "a call that finds it large enough allocates nothing, so it can be captured into a CUDA "
      "graph.")
      .def(
          "__init__",
          [](BoundScratch* self, const DeviceLike& device) {
            new (self) BoundScratch{device_of(device)};
          },
          "device"_a = "cpu", "Takes no memory before the first call.")
      .def_prop_ro(
          "memory",
          [](BoundScratch& self) -> std::optional<BoundTensor> {
            const UsedScratch memory(&self, "scratch.memory");
            if (!self.tensor.defined()) return std::nullopt;
            return BoundTensor{self.device, self.tensor};
          },
          "The memory it has grown to. Hold it as long as a captured graph may run.");
  module.def(
      "paged_attention", record_attention, "encoder"_a, "q"_a, "pages"_a, "page_table"_a,
      "kv_lengths"_a, "cu_seqlens_q"_a, "out"_a = nb::none(), "is_prefill"_a = nb::none(),
      "lse"_a = nb::none(), "sink_logits"_a = nb::none(), "alibi_slopes"_a = nb::none(),
      "schedule"_a = nb::none(), nb::kw_only(), "max_query_length"_a = 1, "min_query_length"_a = 1,
      "max_kv_length"_a = 0, "scale"_a = nb::none(), "causal"_a = true, "window"_a = 0,
      "soft_cap"_a = 0.0f, "settled_keys"_a = false, "scratch"_a = nb::none(),
      "Records attention of several sequences over pages and returns out.\n\n"
      "q and out are [tokens, heads, head_dim] and hold the queries of all sequences. page_table "
      "is i32 [sequences, width]. kv_lengths is i32 [sequences] and counts keys, including those "
      "of the queries. cu_seqlens_q is i32 [sequences + 1] and says which rows of q belong to "
      "which sequence. is_prefill is u8 [sequences]; where it is not 0, results do not depend on "
      "how a prompt is cut into chunks.\n\n"
      "max_query_length and max_kv_length are upper bounds for one sequence; lengths and tables in "
      "device memory may change from replay to replay. A sequence that breaks the bounds gets NaN. "
      "scratch is an AttentionScratch that you keep from call to call; on CUDA a long prompt over "
      "levels is slower without one. schedule is what "
      "attention_schedule() returned for this step. min_query_length says that no sequence has "
      "fewer queries: a step of draft tokens alone saves a command. settled_keys says that the "
      "command ahead writes no keys but those of the call's own tokens. The other arguments are "
      "those of attention().");
  module.def(
      "attention_schedule", record_schedule, "encoder"_a, "pages"_a, "kv_lengths"_a,
      "cu_seqlens_q"_a, "is_prefill"_a = nb::none(), nb::kw_only(), "tokens"_a, "heads"_a,
      "q_dtype"_a = "f16", "max_query_length"_a = 1, "min_query_length"_a = 1, "max_kv_length"_a,
      "causal"_a = true, "window"_a = 0, "memory"_a = nb::none(),
      "Lists the work of a step's paged_attention once for all layers with the same shape of "
      "pages, "
      "heads and options, and returns it, or None where the device needs none (CPU, Metal).\n\n"
      "Record it after the step's lengths and query ranges are in device memory. tokens, heads and "
      "q_dtype are those of q. memory is an earlier schedule whose memory is used again. Results "
      "are the same with and without a schedule.");
}

}  // namespace gyre::python
