#include "gyre/kv_cache.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "cache/calibration_identity.h"
#include "cache/kv_cache_state.h"
#include "cache/snapshot.h"
#include "runtime/device_impl.h"
#include "runtime/recorder.h"
#include "runtime/require.h"

namespace gyre {
namespace {

void check_layer(const KvCacheOptions& options, std::span<const KvLayer> layers, uint64_t index) {
  const KvLayer& layer = layers[index];
  const uint64_t tail_tokens = cache_tail_tokens(layers);
  require(layer.tail == 0 || layer.tail == tail_tokens, "kv_cache: layers with a tail must have ",
          "the same, layer ", index, " has ", layer.tail, " after ", tail_tokens);
  require(layer.sink_tokens < options.capacity, "kv_cache: sink_tokens of layer ", index,
          " must be fewer than the capacity ", options.capacity, ", got ", layer.sink_tokens);
  require(layer.tail <= std::numeric_limits<int32_t>::max(), "kv_cache: the tail of layer ", index,
          " must be below 2^31, got ", layer.tail);
}

// A key's slot in a ring depends on the ring's size.
void require_same_rings(const KvSnapshotInfo& from, const KvSnapshotInfo& to) {
  for (uint64_t i = 0; i < from.slots.size(); ++i) {
    const bool ring = from.options.layers[i].window != 0;
    const KvSnapshotSlots &a = from.slots[i], &b = to.slots[i];
    const auto same = [&](const char* what, uint64_t has, uint64_t wants) {
      require(has == wants, "kv_cache.fork: a capacity of ", to.options.capacity, " would change ",
              what, " of layer ", i, " from ", has, " slots to ", wants,
              ", and a fork keeps every ring's size; give the first cache a capacity in which its ",
              "windows and tails have all their slots");
    };
    if (ring) same("the window", a.body, b.body);
    same("the tail", a.tail, b.tail);
  }
}

}  // namespace

uint64_t cache_tail_tokens(std::span<const KvLayer> layers) {
  const auto has_tail = [](const KvLayer& layer) { return layer.tail != 0; };
  const auto found = std::ranges::find_if(layers, has_tail);
  return found != layers.end() ? found->tail : 0;
}

std::vector<KvLayer> checked_cache_layers(const KvCacheOptions& options) {
  std::vector<KvLayer> layers = resolve_layers("kv_cache", options);
  require(options.capacity != 0 && options.capacity <= std::numeric_limits<int32_t>::max(),
          "kv_cache: capacity must be from 1 to 2^31 - 1, got ", options.capacity);
  require(options.step_tokens != 0 && options.step_tokens <= uint64_t{1} << 24,
          "kv_cache: step_tokens must be from 1 to 2^24, got ", options.step_tokens);
  for (uint64_t i = 0; i < layers.size(); ++i) check_layer(options, layers, i);
  check_layer_calibrations("kv_cache", layers, options.calibration);
  return layers;
}

uint64_t cache_tail_slots(const KvCacheOptions& options, uint64_t tail_tokens) {
  if (tail_tokens == 0) return 0;
  return std::min(options.capacity, tail_tokens + options.step_tokens);
}

uint64_t KvCache::State::Layer::bytes() const {
  uint64_t sum = 0;
  for (uint32_t i = 0; i < segments.count; ++i)
    sum += segments.of[i].k.bytes() + segments.of[i].v.bytes();
  return sum;
}

uint64_t KvCache::State::ring_slots(const KvLayer& layer) const {
  if (layer.window == 0) return options.capacity - layer.sink_tokens;
  // The oldest query of a step still sees its whole window.
  const uint64_t limit = std::min(layer.window, options.capacity);
  return std::min(options.capacity, limit + options.step_tokens - 1);
}

KvCache::State::State(Device device_handle, const KvCacheOptions& wanted)
    : device(std::move(device_handle)),
      options(wanted),
      resolved(checked_cache_layers(options)),
      tail_tokens(cache_tail_tokens(resolved)) {
  require(impl_of(device) != nullptr, "kv_cache: the device handle is empty");
  if (options.v_head_dim == 0) options.v_head_dim = options.head_dim;
  state = device.tensor(DType::u8, {sizeof(abi::KvState)});
  positions = device.tensor(DType::i32, {options.step_tokens});
  std::vector<uint64_t> rings, calibrations;
  for (const KvLayer& layer : resolved) {
    Layer made;
    if (!options.calibration.empty())
      made.segments.calibration = options.calibration[layers.size()];
    made.calibration =
        calibration_checksum({"kv_cache", layers.size(), layer.latent}, made.segments.calibration);
    calibrations.push_back(made.calibration);
    if (shares_kv(layer)) {
      layers.push_back(std::move(made));
      rings.push_back(StepLog::kSharesKv);
      continue;
    }
    const abi::KvPlaces places{layer.sink_tokens, layer.tail, cache_tail_slots(options, layer.tail),
                               ring_slots(layer)};
    const auto body = [&](KvFormat format, KvRole role, uint64_t head_dim) {
      return KvBuffer::allocate(device,
                                {format, role, layer.kv_heads, places.body_capacity, head_dim});
    };
    made.segments.of[0] = {body(layer.k, KvRole::k, layer.head_dim),
                           body(layer.v, KvRole::v, layer.v_head_dim),
                           {state, places, abi::kSegmentBody}};
    if (layer.sink_tokens != 0 || layer.tail != 0) {
      const auto f16 = [&](const KvBuffer& half) {
        return device.tensor(DType::f16, f16_shape(half.shape, places));
      };
      add_f16(made.segments, f16(made.segments.of[0].k), f16(made.segments.of[0].v));
    }
    layers.push_back(std::move(made));
    rings.push_back(layer.window != 0 ? places.body_capacity : 0);
  }
  calibration = calibration_identity(calibrations);
  constexpr StepLog::Rules kRules{"kv_cache", "begin_step()", "rollback() the whole step", true};
  log = std::make_shared<StepLog>(kRules, steps, rings);
}

uint64_t KvCache::State::owner(const char* op, uint64_t layer) const {
  require(layer < layers.size(), op, ": there are ", layers.size(), " layers, got layer ", layer);
  return owner_of(resolved, layer);
}

const KvCache::State::Layer& KvCache::State::writable(const char* op, uint64_t layer) const {
  const uint64_t own = owner(op, layer);
  require_own_kv(op, resolved, layer);
  return layers[own];
}

// As the device has it: the step's tokens are the newest.
abi::KvExtendParams KvCache::State::Sequence::params() const {
  abi::KvExtendParams params{};
  params.state = {length - step, length, tail_begin};
  params.positions = step;
  return params;
}

const void* KvCache::State::list_of(const char* op, const Encoder& encoder) const {
  require(impl_of(encoder.device()) == impl_of(device), op,
          ": the encoder records for another device than the cache's");
  const void* const list = &recorder_of(encoder);
  steps->require_encoder(op, list);
  return list;
}

void KvCache::State::require_complete(const char* op) const {
  unwritten.require_not_dropped(op, *steps, sequence.length);
  log->require_complete(op);
}

void KvCache::State::write(const char* op, Encoder& encoder, const Sequence& next) {
  const void* const list = list_of(op, encoder);
  const NewNote note{log, log->begin_note(next.place())};
  extend_cache(encoder, state, positions, next.params(), &note);
  if (next.step != 0) {
    unwritten.begin(*steps, StepLog::step_of(note.note), sequence.length);
  } else if (next.length <= unwritten.start) {
    steps->forget(unwritten.step);
    unwritten = {};
  }
  log->recorded(note.note, list);
  sequence = next;
}

KvCache::KvCache(Device device, const KvCacheOptions& options) try
    : state_(std::make_unique<State>(std::move(device), options)) {
} catch (const std::bad_alloc&) {
  out_of_memory("kv_cache");
}
KvCache::KvCache(std::unique_ptr<State> state) : state_(std::move(state)) {}
KvCache::KvCache(KvCache&&) noexcept = default;
KvCache& KvCache::operator=(KvCache&&) noexcept = default;
KvCache::~KvCache() = default;

KvCache::State& KvCache::state() const {
  require(state_ != nullptr, "kv_cache: used after it was moved from");
  return *state_;
}

const KvCacheOptions& KvCache::options() const { return state().options; }
const std::vector<KvLayer>& KvCache::layers() const { return state().resolved; }
uint64_t KvCache::length() const { return state().sequence.length; }

uint64_t KvCache::bytes() const {
  uint64_t sum = state().state.bytes() + state().positions.bytes();
  for (const State::Layer& layer : state().layers) sum += layer.bytes();
  return sum;
}

std::vector<KvLayerInfo> KvCache::describe() const try {
  std::vector<KvLayerInfo> rows;
  const State& s = state();
  for (uint64_t i = 0; i < s.layers.size(); ++i) {
    const State::Layer& owner = s.layers[owner_of(s.resolved, i)];
    const CacheSegment& body = owner.segments.of[0];
    rows.push_back({s.resolved[i], body.k.shape.capacity, s.layers[i].bytes(),
                    describe_attention(s.device, body.k.shape, body.v.shape, s.resolved[i].latent),
                    owner.calibration});
  }
  return rows;
} catch (const std::bad_alloc&) {
  out_of_memory("kv_cache.describe");
}

void KvCache::begin_step(Encoder& encoder, uint64_t tokens) try {
  State& s = state();
  require(tokens != 0 && tokens <= s.options.step_tokens,
          "kv_cache.begin_step: from 1 to step_tokens ", s.options.step_tokens, " tokens, got ",
          tokens);
  s.require_complete("kv_cache.begin_step");
  State::Sequence next = s.sequence;
  require(tokens <= s.options.capacity, "kv_cache.begin_step: ", tokens,
          " tokens can never fit into the capacity of ", s.options.capacity);
  require(tokens <= s.options.capacity - next.length, "kv_cache.begin_step: ", next.length,
          " tokens and ", tokens, " more exceed the capacity of ", s.options.capacity,
          "; rollback() tokens, or fork() into a larger capacity");
  next.length += tokens;
  next.step = tokens;
  next.peak = std::max(next.peak, next.length);
  const uint64_t tail_slots = cache_tail_slots(s.options, s.tail_tokens);
  if (next.length > tail_slots)
    next.tail_begin = std::max(next.tail_begin, next.length - tail_slots);
  s.write("kv_cache.begin_step", encoder, next);
} catch (const std::bad_alloc&) {
  out_of_memory("kv_cache.begin_step");
}

Tensor KvCache::positions(uint64_t tokens) const {
  require(tokens <= state().options.step_tokens, "kv_cache.positions: at most step_tokens ",
          state().options.step_tokens, ", got ", tokens);
  return state().positions.slice(0, 0, tokens);
}

NewNote KvCache::State::append_note(const char* op, uint64_t layer, uint64_t tokens) const {
  unwritten.require_not_dropped(op, *steps, sequence.length);
  return {log, log->append_note(layer, tokens)};
}

uint64_t KvCache::State::tokens_of(const char* op, const Tensor& k) const {
  // The ops refuse other ranks.
  const uint64_t tokens = k.rank() == 3 ? k.shape(0) : std::max<uint64_t>(1, sequence.step);
  require(tokens != 0 && tokens <= options.step_tokens, op, ": from 1 to step_tokens ",
          options.step_tokens, " tokens, got ", tokens);
  return tokens;
}

void KvCache::append(Encoder& encoder, uint64_t layer, const Tensor& k, const Tensor& v) const try {
  const State& s = state();
  const State::Layer& l = s.writable("kv_cache.append", layer);
  const uint64_t tokens = s.tokens_of("kv_cache.append", k);
  const void* const list = s.list_of("kv_cache.append", encoder);
  const NewNote note = s.append_note("kv_cache.append", layer, tokens);
  append_cache(encoder, {k, v, l.segments}, &note);
  s.log->recorded(note.note, list);
} catch (const std::bad_alloc&) {
  out_of_memory("kv_cache.append");
}

void KvCache::rope_append(Encoder& encoder, uint64_t layer, const RopeAppendInputs& inputs,
                          const RopeAppendOptions& options) const try {
  constexpr const char* kOp = "kv_cache.rope_append";
  const State& s = state();
  const State::Layer& l = s.writable(kOp, layer);
  require(!s.resolved[layer].latent, kOp, ": layer ", layer, kLatentIsNotRotated);
  const uint64_t tokens = s.tokens_of(kOp, inputs.k);
  RopeAppendInputs in = inputs;
  const bool plain = options.rope && options.rope->mode == RopeMode::plain;
  if (plain && !in.positions.defined()) in.positions = positions(tokens);
  const void* const list = s.list_of(kOp, encoder);
  const NewNote note = s.append_note(kOp, layer, tokens);
  rope_append_cache(encoder, in, options, l.segments, &note);
  s.log->recorded(note.note, list);
} catch (const std::bad_alloc&) {
  out_of_memory("kv_cache.rope_append");
}

void KvCache::end_step(KvStepEnd how) {
  constexpr const char* kOp = "kv_cache.end_step";
  StepLog& log = *state().log;
  if (how == KvStepEnd::captured) return log.mark_captured(kOp);
  require(log.open(), kOp, ": no step is begun, begin_step() comes first");
  log.require_complete(kOp);
}

void KvCache::attend(Encoder& encoder, uint64_t layer, const AttendInputs& in,
                     const AttendOptions& options) const try {
  State& s = state();
  const uint64_t owner = s.owner("kv_cache.attend", layer);
  const uint64_t window = s.resolved[owner].window;
  require(window == 0 || options.mask.window <= window, "kv_cache.attend: layer ", layer,
          " keeps a window of ", window, " keys, asked for ", options.mask.window);
  AttentionOptions with;
  with.scale = options.scale;
  with.mask = options.mask;
  if (options.mask.window == 0) with.mask.window = window;
  const uint64_t tokens = in.q.rank() == 3 ? in.q.shape(0) : 0;  // attend_cache refuses other ranks
  require(tokens <= s.options.step_tokens, "kv_cache.attend: at most step_tokens ",
          s.options.step_tokens, " queries, got ", tokens);
  const void* const list = s.list_of("kv_cache.attend", encoder);
  s.unwritten.require_not_dropped("kv_cache.attend", *s.steps, s.sequence.length);
  const NewNote note{s.log, s.log->attend_note(owner, tokens, with.mask.window)};
  const bool latent = s.resolved[owner].latent;
  with_scratch("kv_cache.attend", s.scratch, in.scratch, latent, [&](AttendScratch& scratch) {
    attend_cache(encoder, {in.q, {}, {}, in.out, in.lse, latent}, with, s.layers[owner].segments,
                 scratch, &note);
  });
  s.log->recorded(note.note, list);
} catch (const std::bad_alloc&) {
  out_of_memory("kv_cache.attend");
}

void KvCache::rollback(Encoder& encoder, uint64_t tokens) try {
  State& s = state();
  State::Sequence next = s.sequence;
  require(tokens <= next.length, "kv_cache.rollback: the cache holds ", next.length,
          " tokens, cannot drop ", tokens);
  const bool takes_back_step = tokens >= next.step;
  next.length -= tokens;
  s.unwritten.require_not_dropped("kv_cache.rollback", *s.steps, next.length);
  if (!takes_back_step) s.log->require_complete("kv_cache.rollback");
  next.tail_begin = std::min(next.tail_begin, next.length);
  next.step = 0;
  for (uint64_t i = 0; i < s.layers.size(); ++i) {
    const uint64_t window = s.resolved[i].window;
    const uint64_t oldest = next.length + 1 > window ? next.length + 1 - window : 0;
    require(s.log->holds(i, next.place(), oldest), "kv_cache.rollback: the window of layer ", i,
            " no longer has key ", oldest, ", which a query at ", next.length, " sees");
  }
  s.write("kv_cache.rollback", encoder, next);
} catch (const std::bad_alloc&) {
  out_of_memory("kv_cache.rollback");
}

void KvCache::clear(Encoder& encoder) try {
  state().write("kv_cache.clear", encoder, {});
} catch (const std::bad_alloc&) {
  out_of_memory("kv_cache.clear");
}

KvCache KvCache::fork(Encoder& encoder, uint64_t capacity) const try {
  const State& from = state();
  const void* const list = from.list_of("kv_cache.fork", encoder);
  from.require_complete("kv_cache.fork");
  KvCacheOptions options = from.options;
  if (capacity != 0) options.capacity = capacity;
  require(options.capacity >= from.options.capacity, "kv_cache.fork: capacity must be at least ",
          from.options.capacity, ", got ", capacity);
  auto made = std::make_unique<State>(from.device, options);
  require_same_rings(from.snapshot(), made->snapshot());
  made->sequence = from.sequence;
  RecordingGroup copies(encoder);
  const NewNote note{made->log, made->log->begin_note(from.sequence.place(), true)};
  const NewNote read{from.log, StepLog::read_note()};
  extend_cache(encoder, made->state, made->positions, from.sequence.params(), &note);
  copy_bytes(encoder, from.positions, made->positions, &read);  // earlier ones stay behind it
  KvSnapshotInfo held = from.snapshot();
  plan_snapshot(held, std::numeric_limits<int64_t>::max());
  from.copy_layers(encoder, held, *made, &read);
  copies.commit();
  made->unwritten = {StepLog::step_of(note.note), 0};
  made->log->recorded(note.note, list);
  from.log->recorded(read.note, list);
  return KvCache(std::move(made));
} catch (const std::bad_alloc&) {
  out_of_memory("kv_cache.fork");
}

}  // namespace gyre
