// Attention of one layer of a step. A layer with a 16-bit tail or sink tokens has its keys in up to
// three kinds of pages: each gives a state per row, and the states are merged.
#include "ops/attention_latent.h"
#include "ops/kv_calibration.h"
#include "ops/paged_attention.h"
#include "runtime/recorder.h"
#include "runtime/require.h"
#include "serving/batch_state.h"

namespace gyre {
namespace {

constexpr const char* kOp = "kv_batch.attend";

// Outputs share no memory with inputs.
void check_written(const AttendInputs& in, std::initializer_list<const Tensor*> read) {
  check_apart(kOp, "out", in.out, read);
  check_apart(kOp, "lse", in.lse, read);
}

// What attention checks, as the caller gave it: with a basis or several kinds of pages, attention
// gets other tensors than these.
void check_given(const AttendInputs& in, const AttentionMask& mask, const KvLayer& layer) {
  const RowDims dims = row_dims(layer.latent, layer.head_dim, layer.v_head_dim);
  check_query(kOp, in.q, "pages", layer.kv_heads, dims.query);
  check_outputs(kOp, {{}, in.out, in.lse, mask.sink_logits},
                {in.q.shape(0), in.q.shape(1), dims.out});
  check_written(in, {&in.q, &mask.sink_logits, &mask.alibi_slopes});
}

uint64_t elements(const Dims& shape) {
  uint64_t count = 1;
  for (const uint64_t size : shape) count *= size;
  return count;
}

}  // namespace

PagedCall KvBatch::State::call_of(const AttendInputs& in, const AttendOptions& with,
                                  const KvLayer& layer) const {
  PagedCall call{.op = kOp, .q = in.q};
  call.options.settled_keys = true;  // a step appends its own tokens only
  call.kv_lengths = tables.kv_lengths();
  call.cu_seqlens_q = tables.cu_seqlens_q();
  call.is_prefill = tables.is_prefill();
  call.options.max_query_length = options.max_query_length;
  call.options.max_kv_length = options.max_kv_length;
  call.options.scale = with.scale;
  call.options.mask = with.mask;
  if (with.mask.window == 0) call.options.mask.window = layer.window;
  call.keys.sink_tokens = layer.sink_tokens;
  call.keys.tail = layer.tail;
  return call;
}

PagedCall KvBatch::State::over(PagedCall call, const KvPoolState::Store& store,
                               abi::KvSegment segment) const {
  call.keys.pages = store.pages;
  call.keys.segment = segment;
  call.page_table = tables.group(store.group).table;
  return call;
}

void KvBatch::State::attend(Encoder& encoder, uint64_t index, const AttendInputs& given,
                            const AttendOptions& with) {
  const bool latent = pool->resolved[owner_of(pool->resolved, index)].latent;
  with_scratch(kOp, scratch, given.scratch, latent,
               [&](AttendScratch& memory) { attend(encoder, index, given, with, memory); });
}

void KvBatch::State::attend(Encoder& encoder, uint64_t index, const AttendInputs& given,
                            const AttendOptions& with, AttendScratch& memory) {
  const void* const list = list_of(kOp, encoder);
  const uint64_t owner = owner_of(pool->resolved, index);
  const KvPoolState::Layer& l = pool->layers[owner];
  const KvLayer& layer = pool->resolved[owner];
  require(layer.window == 0 || with.mask.window <= layer.window, kOp, ": layer ", index,
          " keeps a window of ", layer.window, " keys, asked for ", with.mask.window);
  const TransformPair transforms{l.calibration.k.transform, l.calibration.v.transform,
                                 layer.latent};
  AttendInputs in = given;
  const uint64_t segments = 1 + (l.tail ? 1 : 0) + (l.sink_tokens ? 1 : 0);
  Recording recording(encoder, kOp);
  check_given(given, with.mask, layer);
  check_means(kOp, transforms,
              {in.lse.defined(), with.mask.sink_logits.defined(), with.mask.soft_cap != 0, false});
  const TransformAttention inside =
      enter_transform(recording, encoder.device(), transforms, in.q, in.out, segments != 1);
  in.q = inside.q;
  in.out = inside.out;
  PagedCall call = call_of(in, with, layer);
  call.schedules = &schedules;
  call.keeps_scratch = true;
  if (l.tail) call.keys.tail_begin = tables.group(l.tail->group).tail_begin;
  const AttentionMergeInputs outputs{{}, in.out, in.lse, with.mask.sink_logits};
  AttendScratch reserved = memory;
  const auto attend = [&](const KvPoolState::Store& store, abi::KvSegment segment,
                          const AttentionMergeInputs& to) {
    const PagedCall part = over(call, store, segment);
    check_written(given, {&part.keys.pages.bytes, &part.page_table, &part.kv_lengths,
                          &part.cu_seqlens_q, &part.is_prefill, &part.keys.tail_begin});
    attend_pages(recording, encoder.device(), part, to, reserved);
  };
  if (segments == 1) {
    attend(*l.body, abi::kSegmentBody, outputs);
  } else {
    const Dims shape = attention_partial_shape(segments, in.q.shape(), in.out.shape(2));
    reserved.states = at_least(encoder.device(), memory.states, elements(shape));
    AttentionMergeInputs merged = outputs;
    merged.partial = reserved.states.slice(0, 0, elements(shape)).reshape(shape);
    uint64_t done = 0;
    const auto next_state = [&]() -> AttentionMergeInputs {
      return {
          .partial = merged.partial.slice(0, done++, 1), .out = {}, .lse = {}, .sink_logits = {}};
    };
    attend(*l.body, abi::kSegmentBody, next_state());
    if (l.sink_tokens) attend(*l.sink_tokens, abi::kSegmentSinks, next_state());
    if (l.tail) attend(*l.tail, abi::kSegmentTail, next_state());
    dispatch_merge(recording, merged);
  }
  leave_transform(recording, transforms, inside, given.out);
  const CommandNote note = log->attend_note(owner, 0, 0);
  recording.note({log, note});
  recording.commit();
  log->recorded(note, list);
  memory = reserved;
}

void KvBatch::attend(Encoder& encoder, uint64_t layer, const AttendInputs& inputs,
                     const AttendOptions& with) const try {
  State& s = state();
  const StepsUse use(*s.pool->steps, kOp);
  const std::vector<KvLayer>& layers = s.pool->resolved;
  s.log->check_attend(kOp, layer < layers.size() ? owner_of(layers, layer) : layer);
  s.check_rows(kOp, "q", inputs.q);
  require(!with.mask.tree_mask.defined(), kOp, ": a tree_mask is not supported over pages");
  s.attend(encoder, layer, inputs, with);
} catch (const std::bad_alloc&) {
  out_of_memory("kv_batch.attend");
}

}  // namespace gyre
