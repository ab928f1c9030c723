// Attention over pages: check, problem, plan, dispatch.
#include <algorithm>

#include "abi/kernels.h"
#include "gyre/attention.h"
#include "ops/attention_check.h"
#include "ops/attention_latent.h"
#include "ops/kv_pages.h"
#include "ops/paged_attention.h"
#include "ops/paged_phases.h"
#include "ops/paged_schedule.h"
#include "runtime/device_impl.h"
#include "runtime/layout.h"
#include "runtime/require.h"

namespace gyre {
namespace {

constexpr uint64_t kMaxCounted = (uint64_t{1} << 31) - 1;  // tables and lengths are i32
constexpr uint64_t kMaxSequences = uint64_t{1} << 24;

uint64_t entries_for(uint64_t keys, uint64_t page_tokens) {
  return keys / page_tokens + (keys % page_tokens != 0 ? 1 : 0);
}

// One number for each sequence.
void check_list(const char* op, const char* what, const Tensor& list, DType dtype, uint64_t count) {
  require(
      list.dtype() == dtype && list.rank() == 1 && list.shape(0) == count && list.is_contiguous(),
      op, ": ", what, " must be contiguous ", dtype, " [", count, "], got ", list.dtype(), " ",
      list.shape(), " with strides ", list.strides());
}

void check_lists(const PagedCall& call, uint64_t sequences) {
  for (const auto& [what, list] :
       {std::pair{"kv_lengths", &call.kv_lengths}, {"cu_seqlens_q", &call.cu_seqlens_q}})
    require(list->defined(), call.op, ": ", what, " is undefined");
  check_list(call.op, "kv_lengths", call.kv_lengths, DType::i32, sequences);
  check_list(call.op, "cu_seqlens_q", call.cu_seqlens_q, DType::i32, sequences + 1);
  if (call.is_prefill.defined())
    check_list(call.op, "is_prefill", call.is_prefill, DType::u8, sequences);
  if (call.keys.tail_begin.defined())
    check_list(call.op, "tail_begin", call.keys.tail_begin, DType::i32, sequences);
}

void check_table(const PagedCall& call) {
  const Tensor& table = call.page_table;
  require(table.defined(), call.op, ": page_table is undefined");
  require(table.dtype() == DType::i32 && table.rank() == 2, call.op,
          ": page_table must be i32 [sequences, width], got ", table.dtype(), " ", table.shape());
  require(table.stride(1) == 1 || table.shape(1) <= 1, call.op,
          ": entries of page_table must be contiguous, got strides ", table.strides());
  const uint64_t sequences = table.shape(0);
  require(sequences <= kMaxSequences, call.op, ": at most 2^24 sequences, got ", sequences);
  check_lists(call, sequences);
}

uint64_t checked_min_query_length(const char* op, const PagedAttentionOptions& options) {
  require(options.max_query_length != 0 && options.max_query_length <= kMaxCounted, op,
          ": max_query_length must be from 1 to 2^31 - 1, got ", options.max_query_length);
  require(options.min_query_length != 0 && options.min_query_length <= options.max_query_length, op,
          ": min_query_length must be from 1 to max_query_length ", options.max_query_length,
          ", got ", options.min_query_length);
  return options.min_query_length;
}

// The table's rows must have an entry for every key of the segment.
PagedBounds checked_bounds(const PagedCall& call) {
  const PagedAttentionOptions& options = call.options;
  const PagedSegment& keys = call.keys;
  const uint64_t width = call.page_table.shape(1), page_tokens = keys.pages.shape.page_tokens;
  require(width <= kMaxCounted, call.op, ": at most 2^31 - 1 entries, got ", width);
  const uint64_t held = std::min(width * page_tokens, kMaxCounted);
  const uint64_t length = options.max_kv_length != 0 ? options.max_kv_length : held;
  const uint64_t fewest = checked_min_query_length(call.op, options);
  require(length <= kMaxCounted, call.op, ": max_kv_length must be below 2^31, got ", length);
  const uint64_t newest =
      keys.segment == abi::kSegmentSinks ? std::min(keys.sink_tokens, length) : length;
  const uint64_t entries =
      keys.ring_entries != 0 ? keys.ring_entries : entries_for(newest, page_tokens);
  require(keys.first_entry <= width && entries <= width - keys.first_entry, call.op,
          ": max_kv_length ", length, " needs ", entries, " pages of ", page_tokens,
          ", page_table has rows of ", width - std::min(width, keys.first_entry));
  return {call.page_table.shape(0), fewest, options.max_query_length, length};
}

// Outputs share no memory with inputs.
void check_written(const PagedCall& call, const AttentionMergeInputs& outputs) {
  const struct {
    const char* name;
    const Tensor& tensor;
  } written[] = {{"out", outputs.out}, {"lse", outputs.lse}, {"partial", outputs.partial}};
  for (const auto& [name, tensor] : written) {
    check_apart(call.op, name, tensor,
                {&call.q, &call.keys.pages.bytes, &call.page_table, &call.kv_lengths,
                 &call.cu_seqlens_q, &call.is_prefill, &call.options.mask.alibi_slopes,
                 &call.keys.tail_begin, &outputs.sink_logits});
  }
}

PagedBounds check_paged(const PagedCall& call, const AttentionMergeInputs& outputs) {
  const KvPageShape& shape = call.keys.pages.shape;
  check_pages(call.op, call.keys.pages);
  check_query(call.op, call.q, "pages", shape.kv_heads, row_dims(shape).query);
  check_table(call);
  if (shape.latent) check_latent_options(call.op, call.options.scale, call.options.mask);
  checked_scale(call.op, call.options.scale, shape.head_dim);
  check_mask(call.op, call.options.mask, call.q.shape(1));
  require(!call.options.mask.tree_mask.defined(), call.op,
          ": a tree_mask is not supported over pages");
  const PagedBounds bounds = checked_bounds(call);
  if (outputs.partial.defined()) {
    check_partial_tensor(call.op, outputs.partial);
    const Dims states = attention_partial_shape(1, call.q.shape(), row_dims(shape).out);
    require(outputs.partial.shape() == states, call.op, ": partial must have shape ", states,
            ", got ", outputs.partial.shape());
  } else {
    check_outputs(call.op, outputs, {call.q.shape(0), call.q.shape(1), row_dims(shape).out});
  }
  check_written(call, outputs);
  return bounds;
}

// What follows from the pages and the bounds.
void fill_problem(const KvPages& pages, const KvPageParts& parts, const PagedBounds& bounds,
                  uint64_t window, abi::AttentionProblem& p) {
  p.kv_heads = pages.shape.kv_heads;
  p.capacity = p.keys = bounds.max_kv_length;
  if (window != 0 && window < p.keys)
    p.keys = std::min(p.keys, window + bounds.max_query_length - 1);
  p.key_bytes = pages.bytes.shape(1) / p.kv_heads / pages.shape.page_tokens;
  p.addresses = parts.k_codes.address() | parts.k_scales.address() | parts.v_codes.address() |
                parts.v_scales.address();
  p.k = parts.k;
  p.v = parts.v;
  p.sequences = bounds.sequences;
  p.page_stride = parts.page_stride;
  p.page_tokens = static_cast<uint32_t>(pages.shape.page_tokens);
  p.max_query_length = static_cast<uint32_t>(bounds.max_query_length);
  p.latent = pages.shape.latent ? 1 : 0;
}

abi::AttentionProblem make_problem(const PagedCall& call, const KvPageParts& parts,
                                   const PagedBounds& bounds, const AttentionMergeInputs& outputs) {
  abi::AttentionProblem p{};
  p.tokens = call.q.shape(0);
  p.heads = call.q.shape(1);
  fill_problem(call.keys.pages, parts, bounds, call.options.mask.window, p);
  p.q_dtype = static_cast<uint32_t>(call.q.dtype());
  p.keeps_scratch = call.keeps_scratch ? 1 : 0;
  p.states = outputs.partial.defined() ? 1 : 0;
  p.out_dtype = p.states != 0 ? static_cast<uint32_t>(DType::f32)
                              : static_cast<uint32_t>(outputs.out.dtype());
  return p;
}

abi::KvTable make_table(const PagedCall& call, const KvPageParts& parts,
                        const PagedBounds& bounds) {
  abi::KvTable table{};
  table.sequences = bounds.sequences;
  table.stride = call.page_table.stride(0);
  table.pages = call.keys.pages.bytes.shape(0);
  table.page_stride = parts.page_stride;
  table.max_kv_length = bounds.max_kv_length;
  table.max_query_length = static_cast<uint32_t>(bounds.max_query_length);
  table.page_tokens = static_cast<uint32_t>(call.keys.pages.shape.page_tokens);
  table.first_entry = static_cast<uint32_t>(call.keys.first_entry);
  table.ring_entries = static_cast<uint32_t>(call.keys.ring_entries);
  table.page_inverse = abi::kv_page_inverse(table.page_tokens);
  return table;
}

abi::AttentionParams make_params(const PagedCall& call, const KvPageParts& parts,
                                 const PagedBounds& bounds, const AttentionMergeInputs& outputs) {
  abi::AttentionParams p{};
  p.tokens = call.q.shape(0);
  p.heads = call.q.shape(1);
  p.kv_heads = call.keys.pages.shape.kv_heads;
  p.group = static_cast<uint32_t>(p.heads / p.kv_heads);
  p.window = call.options.mask.window;
  p.q_token_stride = call.q.stride(0) * size_bytes(call.q.dtype());
  p.q_head_stride = call.q.stride(1) * size_bytes(call.q.dtype());
  p.q_dtype = static_cast<uint32_t>(call.q.dtype());
  p.k = parts.k;
  p.v = parts.v;
  p.table = make_table(call, parts, bounds);
  p.segment = call.keys.segment;
  p.places.sink_tokens = call.keys.sink_tokens;
  p.places.tail = call.keys.tail;
  p.scale = checked_scale(call.op, call.options.scale, call.q.shape(2));
  p.soft_cap = call.options.mask.soft_cap;
  p.causal = call.options.mask.causal ? 1 : 0;
  p.settled_keys = call.options.settled_keys ? 1 : 0;
  p.latent = call.keys.pages.shape.latent ? 1 : 0;
  if (outputs.partial.defined()) return p;
  p.out_dtype = static_cast<uint32_t>(outputs.out.dtype());
  fill_outputs(outputs, p);
  return p;
}

// The sequences of a phase: one command, or two where states are reduced by the second.
void dispatch_phase(Recording& recording, const PagedCall& call, const KvPageParts& parts,
                    const abi::AttentionPlan& plan, abi::AttentionParams p,
                    const AttentionMergeInputs& outputs, const Tensor& scratch,
                    const Tensor& schedule) {
  const bool states = outputs.partial.defined();
  p.splits = plan.splits;
  p.fewest_split_keys = plan.fewest_split_keys;
  p.unpacked_room = plan.unpacked_room, p.unpacked_work = plan.unpacked_work;
  const Tensor none;
  const auto record = [&](const auto& kernel, const auto& spec) {
    recording.dispatch(kernel, spec, p,
                       {&call.q, &parts.k_codes, &parts.k_scales, &parts.v_codes, &parts.v_scales,
                        states ? &outputs.partial : &outputs.out, &outputs.lse,
                        &outputs.sink_logits, &call.options.mask.alibi_slopes, &schedule,
                        plan.scratch_floats != 0 ? &scratch : &none, &call.keys.tail_begin,
                        &call.page_table, &call.kv_lengths, &call.cu_seqlens_q, &call.is_prefill});
  };
  if (plan.reduce == abi::AttentionReduce::separate) {
    p.partial = abi::kAttentionPartial;
    record_planned(plan, record);
  }
  p.partial = plan.scratch_floats != 0 ? abi::kAttentionMerged : abi::kAttentionWhole;
  if (states) p.partial = abi::kAttentionStates;
  record_planned(plan, record);
}

}  // namespace

void attend_pages(Recording& recording, const Device& device, const PagedCall& call,
                  const AttentionMergeInputs& outputs, AttendScratch& scratch) {
  const PagedBounds bounds = check_paged(call, outputs);
  if (call.q.shape(0) == 0 || bounds.sequences == 0) return;
  const KvPageParts parts = page_parts(call.keys.pages);
  const abi::AttentionProblem problem = make_problem(call, parts, bounds, outputs);
  abi::AttentionParams params = make_params(call, parts, bounds, outputs);
  const std::vector<PhasePlan> phases =
      plan_phases(recording, call.op, problem, bounds, call.is_prefill.defined());
  const PagedSchedules schedules(phases, params, bounds, call.keys.tail_begin);
  if (call.schedule.defined()) schedules.check(call);
  uint64_t floats = 0;
  for (const PhasePlan& of : phases) floats = std::max(floats, of.plan.scratch_floats);
  const bool own = !call.schedule.defined() && call.schedules == nullptr;
  Tensor& kept = scratch.of_kernels(problem.latent != 0);
  Tensor reserved = kept;
  if (const uint64_t all = floats + (own ? schedules.words() : 0); all != 0)
    reserved = at_least(device, reserved, all);
  for (size_t i = 0; i < phases.size(); ++i) {
    Tensor schedule;
    if (schedules.words(i) == 0) {
      schedule = {};
    } else if (call.schedule.defined()) {
      schedule = schedules.part(call.schedule, i);
    } else if (own) {
      schedule = schedules.part(reserved.slice(0, floats, schedules.words()), i);
      schedules.dispatch(recording, call, i, schedule);
    } else {
      schedule = schedules.shared(recording, device, call, i);
    }
    params.phase = phases[i].phase;
    params.schedule_key = schedules.key(i);
    dispatch_phase(recording, call, parts, phases[i].plan, params, outputs, reserved, schedule);
  }
  kept = reserved;
}

Tensor attention_schedule(Encoder& encoder, const AttentionScheduleInputs& in,
                          const PagedAttentionOptions& options, const Tensor& memory) try {
  constexpr const char* kOp = "attention_schedule";
  Recording recording(encoder, kOp);
  check_pages(kOp, in.pages);
  const uint64_t kv_heads = in.pages.shape.kv_heads;
  require(in.heads != 0 && in.heads % kv_heads == 0, kOp,
          ": heads must be a multiple of the pages' ", kv_heads, " KV heads, got ", in.heads);
  require(in.kv_lengths.defined(), kOp, ": kv_lengths is undefined");
  require(in.kv_lengths.rank() == 1, kOp, ": kv_lengths must have one dimension, got ",
          in.kv_lengths.shape());
  PagedCall call{.op = kOp};
  call.kv_lengths = in.kv_lengths, call.cu_seqlens_q = in.cu_seqlens_q,
  call.is_prefill = in.is_prefill;
  const uint64_t sequences = in.kv_lengths.shape(0);
  require(sequences <= kMaxSequences, kOp, ": at most 2^24 sequences, got ", sequences);
  check_lists(call, sequences);
  require(options.max_kv_length != 0 && options.max_kv_length <= kMaxCounted, kOp,
          ": max_kv_length must be from 1 to 2^31 - 1, got ", options.max_kv_length);
  const PagedBounds bounds{sequences, checked_min_query_length(kOp, options),
                           options.max_query_length, options.max_kv_length};
  if (in.tokens == 0 || sequences == 0) return {};
  const KvPageParts parts = page_parts(in.pages);
  abi::AttentionProblem problem{};
  problem.tokens = in.tokens, problem.heads = in.heads;
  problem.q_dtype = static_cast<uint32_t>(in.q_dtype);
  fill_problem(in.pages, parts, bounds, options.mask.window, problem);
  abi::AttentionParams params{};
  params.tokens = in.tokens, params.heads = in.heads, params.kv_heads = kv_heads;
  params.group = static_cast<uint32_t>(in.heads / kv_heads);
  params.window = options.mask.window;
  params.causal = options.mask.causal ? 1 : 0;
  params.segment = abi::kSegmentBody;
  params.table.sequences = sequences;
  params.table.max_kv_length = bounds.max_kv_length;
  params.table.max_query_length = static_cast<uint32_t>(bounds.max_query_length);
  const std::vector<PhasePlan> phases =
      plan_phases(recording, kOp, problem, bounds, in.is_prefill.defined());
  const PagedSchedules schedules(phases, params, bounds, {});
  if (schedules.words() == 0) return {};
  const Tensor to = at_least(encoder.device(), memory, schedules.words());
  for (size_t i = 0; i < phases.size(); ++i)
    if (schedules.words(i) != 0) schedules.dispatch(recording, call, i, schedules.part(to, i));
  recording.commit();
  return to;
} catch (const std::bad_alloc&) {
  out_of_memory("attention_schedule");
}

void attention(Encoder& encoder, const PagedAttentionInputs& in,
               const PagedAttentionOptions& options) try {
  Recording recording(encoder, "attention");
  PagedCall call{.op = "attention", .q = in.q};
  call.keys.pages = in.pages;
  call.page_table = in.page_table;
  call.kv_lengths = in.kv_lengths;
  call.cu_seqlens_q = in.cu_seqlens_q;
  call.is_prefill = in.is_prefill;
  call.schedule = in.schedule;
  call.keeps_scratch = in.scratch != nullptr;
  call.options = options;
  AttendScratch own;
  with_scratch(call.op, own, in.scratch, in.pages.shape.latent, [&](AttendScratch& scratch) {
    attend_pages(recording, encoder.device(), call, {{}, in.out, in.lse, options.mask.sink_logits},
                 scratch);
    recording.commit();
  });
} catch (const std::bad_alloc&) {
  out_of_memory("attention");
}

}  // namespace gyre
