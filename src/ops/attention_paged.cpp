// Attention over pages: check, problem, plan, dispatch.
#include <algorithm>

#include "gyre/attention.h"
#include "ops/attention_check.h"
#include "ops/kv_pages.h"
#include "ops/paged_attention.h"
#include "runtime/device_impl.h"
#include "runtime/layout.h"
#include "runtime/require.h"

namespace gyre {
namespace {

constexpr uint64_t kMostCounted = (uint64_t{1} << 31) - 1;  // tables and lengths are i32

uint64_t value_dim(const KvPageShape& shape) {
  return shape.v_head_dim != 0 ? shape.v_head_dim : shape.head_dim;
}

uint64_t entries_for(uint64_t keys, uint64_t page_tokens) {
  return keys / page_tokens + (keys % page_tokens != 0 ? 1 : 0);
}

// Bounds on what is in device memory.
struct PagedBounds {
  uint64_t sequences, most_queries, most_length;
};

// One number for each sequence.
void check_list(const char* op, const char* what, const Tensor& list, DType dtype, uint64_t count) {
  require(
      list.dtype() == dtype && list.rank() == 1 && list.shape(0) == count && list.is_contiguous(),
      op, ": ", what, " must be contiguous ", dtype, " [", count, "], got ", list.dtype(), " ",
      list.shape(), " with strides ", list.strides());
}

void check_table(const PagedCall& call) {
  const Tensor& table = call.page_table;
  require(table.defined(), call.op, ": page_table is undefined");
  require(table.dtype() == DType::i32 && table.rank() == 2, call.op,
          ": page_table must be i32 [sequences, width], got ", table.dtype(), " ", table.shape());
  require(table.stride(1) == 1 || table.shape(1) <= 1, call.op,
          ": entries of page_table must be contiguous, got strides ", table.strides());
  const uint64_t sequences = table.shape(0);
  require(sequences <= uint64_t{1} << 24, call.op, ": at most 2^24 sequences, got ", sequences);
  for (const auto& [what, list] :
       {std::pair{"lengths", &call.lengths}, {"query_begin", &call.query_begin}})
    require(list->defined(), call.op, ": ", what, " is undefined");
  check_list(call.op, "lengths", call.lengths, DType::i32, sequences);
  check_list(call.op, "query_begin", call.query_begin, DType::i32, sequences + 1);
  if (call.prompts.defined()) check_list(call.op, "prompts", call.prompts, DType::u8, sequences);
  if (call.keys.tail_begin.defined())
    check_list(call.op, "tail_begin", call.keys.tail_begin, DType::i32, sequences);
}

// The table's rows must have an entry for every key of the segment.
PagedBounds checked_bounds(const PagedCall& call) {
  const PagedAttentionOptions& options = call.options;
  const PagedSegment& keys = call.keys;
  const uint64_t width = call.page_table.shape(1), page_tokens = keys.pages.shape.page_tokens;
  require(width <= kMostCounted, call.op, ": at most 2^31 - 1 entries, got ", width);
  const uint64_t held = std::min(width * page_tokens, kMostCounted);
  const uint64_t length = options.most_length != 0 ? options.most_length : held;
  require(options.most_queries != 0 && options.most_queries <= kMostCounted, call.op,
          ": most_queries must be from 1 to 2^31 - 1, got ", options.most_queries);
  require(length <= kMostCounted, call.op, ": most_length must be below 2^31, got ", length);
  const uint64_t newest =
      keys.segment == abi::kSegmentSinks ? std::min(keys.sinks, length) : length;
  const uint64_t entries =
      keys.ring_entries != 0 ? keys.ring_entries : entries_for(newest, page_tokens);
  require(keys.first_entry <= width && entries <= width - keys.first_entry, call.op,
          ": most_length ", length, " needs ", entries, " pages of ", page_tokens,
          ", page_table has rows of ", width - std::min(width, keys.first_entry));
  return {call.page_table.shape(0), options.most_queries, length};
}

// What is written shares no memory with what is read.
void check_written(const PagedCall& call, const AttentionMergeInputs& outputs) {
  const struct {
    const char* name;
    const Tensor& tensor;
  } written[] = {{"out", outputs.out}, {"lse", outputs.lse}, {"partial", outputs.partial}};
  for (const auto& [name, tensor] : written) {
    check_apart(
        call.op, name, tensor,
        {&call.q, &call.keys.pages.bytes, &call.page_table, &call.lengths, &call.query_begin,
         &call.prompts, &call.slopes, &call.keys.tail_begin, &outputs.sinks});
  }
}

PagedBounds check_paged(const PagedCall& call, const AttentionMergeInputs& outputs) {
  const KvPageShape& shape = call.keys.pages.shape;
  check_pages(call.op, call.keys.pages);
  check_query(call.op, call.q, "pages", shape.kv_heads, shape.head_dim);
  check_table(call);
  check_scale(call.op, call.options.scale, call.options.soft_cap);
  check_per_head(call.op, "slopes", call.slopes, call.q.shape(1));
  const PagedBounds bounds = checked_bounds(call);
  if (outputs.partial.defined()) {
    check_partial_tensor(call.op, outputs.partial);
    const Dims states = attention_partial_shape(1, call.q.shape(), value_dim(shape));
    require(outputs.partial.shape() == states, call.op, ": partial must have shape ", states,
            ", got ", outputs.partial.shape());
  } else {
    check_outputs(call.op, outputs, {call.q.shape(0), call.q.shape(1), value_dim(shape)});
  }
  check_written(call, outputs);
  return bounds;
}

abi::AttentionProblem make_problem(const PagedCall& call, const KvPageParts& parts,
                                   const PagedBounds& bounds, const AttentionMergeInputs& outputs) {
  const uint64_t window = call.options.window;
  abi::AttentionProblem p{};
  p.tokens = call.q.shape(0);
  p.heads = call.q.shape(1);
  p.kv_heads = call.keys.pages.shape.kv_heads;
  p.capacity = p.keys = bounds.most_length;
  if (window != 0 && window < p.keys) p.keys = std::min(p.keys, window + bounds.most_queries - 1);
  p.key_bytes = call.keys.pages.bytes.shape(1) / p.kv_heads / call.keys.pages.shape.page_tokens;
  p.addresses = parts.k_codes.address() | parts.k_scales.address() | parts.v_codes.address() |
                parts.v_scales.address();
  p.k = parts.k;
  p.v = parts.v;
  p.q_dtype = static_cast<uint32_t>(call.q.dtype());
  p.states = outputs.partial.defined() ? 1 : 0;
  p.out_dtype = p.states != 0 ? static_cast<uint32_t>(DType::f32)
                              : static_cast<uint32_t>(outputs.out.dtype());
  p.sequences = bounds.sequences;
  p.page_stride = parts.page_stride;
  p.page_tokens = static_cast<uint32_t>(call.keys.pages.shape.page_tokens);
  p.most_queries = static_cast<uint32_t>(bounds.most_queries);
  return p;
}

abi::KvTable make_table(const PagedCall& call, const KvPageParts& parts,
                        const PagedBounds& bounds) {
  abi::KvTable table{};
  table.sequences = bounds.sequences;
  table.stride = call.page_table.stride(0);
  table.pages = call.keys.pages.bytes.shape(0);
  table.page_stride = parts.page_stride;
  table.most_length = bounds.most_length;
  table.most_queries = static_cast<uint32_t>(bounds.most_queries);
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
  p.window = call.options.window;
  p.q_token_stride = call.q.stride(0) * size_bytes(call.q.dtype());
  p.q_head_stride = call.q.stride(1) * size_bytes(call.q.dtype());
  p.q_dtype = static_cast<uint32_t>(call.q.dtype());
  p.k = parts.k;
  p.v = parts.v;
  p.table = make_table(call, parts, bounds);
  p.segment = call.keys.segment;
  p.places.sinks = call.keys.sinks;
  p.places.tail = call.keys.tail;
  p.scale = call.options.scale;
  p.soft_cap = call.options.soft_cap;
  p.causal = call.options.causal ? 1 : 0;
  if (outputs.partial.defined()) return p;
  p.out_dtype = static_cast<uint32_t>(outputs.out.dtype());
  fill_outputs(outputs, p);
  return p;
}

// The sequences of a phase: one command, or two where states are reduced by the second.
void dispatch_phase(Recording& recording, const PagedCall& call, const KvPageParts& parts,
                    const abi::AttentionPlan& plan, abi::AttentionParams p,
                    const AttentionMergeInputs& outputs, const Tensor& scratch) {
  const bool states = outputs.partial.defined();
  p.splits = plan.splits;
  p.fewest_split_keys = plan.fewest_split_keys;
  const Tensor none;
  const auto record = [&](const auto& kernel, const auto& spec) {
    recording.dispatch(
        kernel, spec, p,
        {&call.q, &parts.k_codes, &parts.k_scales, &parts.v_codes, &parts.v_scales,
         states ? &outputs.partial : &outputs.out, &outputs.lse, &outputs.sinks, &call.slopes,
         &none, plan.scratch_floats != 0 ? &scratch : &none, &call.keys.tail_begin,
         &call.page_table, &call.lengths, &call.query_begin, &call.prompts});
  };
  if (plan.reduce == abi::AttentionReduce::separate) {
    p.partial = abi::kAttentionPartial;
    record_planned(plan, record);
  }
  p.partial = plan.scratch_floats != 0 ? abi::kAttentionMerged : abi::kAttentionWhole;
  if (states) p.partial = abi::kAttentionStates;
  record_planned(plan, record);
}

abi::AttentionPlan plan_phase(const Recording& recording, abi::AttentionProblem problem,
                              abi::AttentionPhase phase) {
  problem.phase = phase;
  abi::AttentionPlan plan = abi::attention_default_plan(problem);
  recording.plan(kAttention, problem, plan);
  return plan;
}

}  // namespace

void attend_pages(Recording& recording, const Device& device, const PagedCall& call,
                  const AttentionMergeInputs& outputs, AttendScratch& scratch) {
  using abi::AttentionPhase;
  const PagedBounds bounds = check_paged(call, outputs);
  if (call.q.shape(0) == 0 || bounds.sequences == 0) return;
  const KvPageParts parts = page_parts(call.keys.pages);
  const abi::AttentionProblem problem = make_problem(call, parts, bounds, outputs);
  abi::AttentionParams params = make_params(call, parts, bounds, outputs);
  const abi::AttentionPlan plan = plan_phase(recording, problem, AttentionPhase::decode);
  const bool prompts =
      call.prompts.defined() || bounds.most_queries * params.group > abi::kDecodePhaseRows;
  const abi::AttentionPlan many =
      prompts ? plan_phase(recording, problem, AttentionPhase::prompt) : plan;
  // One command where one kernel takes both.
  const bool decode = plan.kernel == abi::AttentionKernel::attention_decode ||
                      many.kernel != plan.kernel || many.spec != plan.spec ||
                      many.reduce != plan.reduce;
  Tensor reserved = scratch.in_kernel;
  if (plan.scratch_floats != 0) reserved = at_least(device, reserved, plan.scratch_floats);
  params.phase = decode ? AttentionPhase::decode : AttentionPhase::all;
  dispatch_phase(recording, call, parts, plan, params, outputs, reserved);
  if (decode && prompts) {
    require(many.scratch_floats == 0, call.op, ": a prompt's keys are not cut");
    params.phase = AttentionPhase::prompt;
    dispatch_phase(recording, call, parts, many, params, outputs, {});
  }
  scratch.in_kernel = reserved;
}

void attention(Encoder& encoder, const PagedAttentionInputs& in,
               const PagedAttentionOptions& options) try {
  Recording recording(encoder, "attention");
  PagedCall call{.op = "attention", .q = in.q};
  call.keys.pages = in.pages;
  call.page_table = in.page_table;
  call.lengths = in.lengths;
  call.query_begin = in.query_begin;
  call.prompts = in.prompts;
  call.slopes = in.slopes;
  call.options = options;
  // The CPU's counters lie elsewhere for other numbers of sequences: it takes fresh zeros.
  const bool kept = in.scratch != nullptr && encoder.device().stream() != 0;
  AttendScratch scratch;
  if (kept) scratch.in_kernel = *in.scratch;
  attend_pages(recording, encoder.device(), call, {{}, in.out, in.lse, in.sinks}, scratch);
  recording.commit();
  if (kept) *in.scratch = scratch.in_kernel;
} catch (const std::bad_alloc&) {
  out_of_memory("attention");
}

}  // namespace gyre
