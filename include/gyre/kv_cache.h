#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "gyre/attention.h"
#include "gyre/calibration.h"
#include "gyre/encoder.h"
#include "gyre/export.h"
#include "gyre/format.h"
#include "gyre/rope_append.h"
#include "gyre/tensor.h"

namespace gyre {

inline constexpr uint64_t kKvMaxLayers = 1024;  // of a cache or a pool

// What one layer stores.
struct KvLayer {
  KvFormat k = KvFormat::tq8;
  KvFormat v = KvFormat::tq4;
  uint64_t window = 0;  // keys a query of this layer sees, its own included; 0: all
  uint64_t tail = 0;    // newest keys up to its own that a query sees in f16, others compressed
  uint64_t sink_tokens = 0;  // the first tokens stay in f16
  // The heads and dims of its K and V. 0: those of the options, except that a layer with a head_dim
  // of its own has the same v_head_dim unless it gives one.
  uint64_t kv_heads = 0;
  uint64_t head_dim = 0;
  uint64_t v_head_dim = 0;
  // The layer has no K and V: it attends over those of this earlier layer, which are stored once.
  // The other fields are that layer's and may be left out. append() to it is refused.
  std::optional<uint64_t> kv_shared_layer_index{};
  // Latent attention (MLA): k is the latent, which is V as well, and v the rotary part of K; append
  // and attend take them as AttentionInputs::latent says. kv_heads is 1. See docs/latent.md.
  bool latent = false;

  bool operator==(const KvLayer&) const = default;
};

// The layer of caches and pools that are given none. Answers of a model stay those of 16 bits with
// a tail and a sink token, and change within a few words without (docs/quality.md).
inline constexpr KvLayer kDefaultKvLayer{.tail = 128, .sink_tokens = 1};

// The usual choices for a whole model, for kv_layers().
struct KvPolicy {
  KvLayer layer = kDefaultKvLayer;       // most layers
  uint64_t edge_layers = 0;              // layers at each end that ...
  KvFormat edge_format = KvFormat::tq8;  // ... are stored in this
  uint64_t window = 0;                   // keys that window layers see
  uint64_t full_every = 0;  // every full_every-th layer sees all, the others a window; 0: all
  KvFormat window_format = KvFormat::f16;
  // Layers at the end that share the cache of the last layer before them with the same window.
  uint64_t kv_shared_layers = 0;
};

GYRE_API std::vector<KvLayer> kv_layers(uint64_t count, const KvPolicy& policy);

struct KvCacheOptions {
  uint64_t kv_heads = 0;  // of the layers that give none; so are the next two
  uint64_t head_dim = 0;
  uint64_t v_head_dim = 0;  // 0: head_dim
  uint64_t capacity = 0;    // tokens at most; layers with a window keep fewer
  std::vector<KvLayer> layers = {kDefaultKvLayer};
  uint64_t step_tokens = 512;  // of one begin_step() at most: rings keep this many extra slots
  // A calibration: one for each layer, or none. A layer that has one keeps everything in its bases,
  // sink tokens and tail too, and its K and V are native formats; K and V have a basis both or
  // neither. A layer that shares another's cache has none. Do not write to these tensors
  // afterwards.
  std::vector<KvLayerCalibration> calibration{};
};

struct AttendInputs {
  Tensor q{};    // [tokens, heads, head_dim]: the newest tokens; of a latent layer + v_head_dim
  Tensor out{};  // [tokens, heads, head_dim of V]; of a latent layer head_dim
  Tensor lse{};  // [tokens, heads] f32, as in AttentionInputs
  // Scratch memory of the caller's, as in AttentionInputs: caches whose calls run one after the
  // other can share it, latent layers and others one each. On CUDA the prompts of a compressed
  // layer take 2 bytes for each coordinate of K and V. Null: the cache keeps its own.
  Tensor* scratch = nullptr;
};

struct AttendOptions {
  std::optional<float> scale{};  // as in AttentionOptions
  AttentionMask mask{};          // window 0: the layer's; otherwise at most that
};

// How end_step() knows that every layer has its tokens.
enum class KvStepEnd : uint8_t {
  checked,   // from the append() calls that were recorded or replayed; a missing layer is refused
  captured,  // a CUDA graph of the caller's captured them: the library does not see it run
};

// The format and dims that are stored.
struct KvLayerInfo {
  KvLayer layer{};
  uint64_t slots = 0;    // of the body: capacity, or the ring of a window
  uint64_t bytes = 0;    // sink tokens and tail included; 0: it shares another layer's cache
  std::string kernel{};  // what attends over it on this device; decoding may have one of its own
  uint64_t calibration = 0;  // a checksum of its calibration; 0: it has none
};

// The KV cache of a model, or of one layer. It owns the memory and decides what lies where; how
// long it is and where each step begins is in device memory, so append() and attend() recorded once
// can be replayed for a whole generation:
//
//   cache.begin_step(encoder, 1); encoder.submit();   // every step: room for one more token
//   graph.replay();                                   // rope_append and attend, layer by layer
//
// A step is begin_step(), then append() (or rope_append()) and attend() of every layer. What is
// missing or out of order is refused: by the call itself where it can be known, otherwise by
// submit() or replay(), before anything runs. append() and attend() may be recorded before there is
// a step, for any number of tokens up to step_tokens: they then run in any step of that many
// tokens. A refused call changes nothing. One thread at a time, replays included. One encoder at a
// time: a second one is refused while another has unsubmitted calls on the cache. Copying is
// fork(); moving is cheap.
class GYRE_API KvCache {
 public:
  KvCache(Device device, const KvCacheOptions& options);
  KvCache(KvCache&&) noexcept;
  KvCache& operator=(KvCache&&) noexcept;
  ~KvCache();

  const KvCacheOptions& options() const;       // as given; a v_head_dim of 0 filled in
  const std::vector<KvLayer>& layers() const;  // with every number filled in
  uint64_t length() const;                     // tokens, as far as recorded
  uint64_t bytes() const;                      // without attend()'s scratch memory
  std::vector<KvLayerInfo> describe() const;

  // The next `tokens` tokens begin: their positions are set, and every layer with a cache of its
  // own must get them by append(). Refused while a layer lacks the tokens of the step before.
  // Recorded into `encoder`, but not into a graph: it holds for this moment.
  void begin_step(Encoder& encoder, uint64_t tokens);
  // Positions of the tokens of the last begin_step(): i32 [tokens], in device memory, for rope.
  Tensor positions(uint64_t tokens) const;

  // k and v: [tokens, kv_heads, head_dim] as layers() has them, f32, f16 or bf16, any strides with
  // contiguous head_dim; tokens as in the begin_step() of the step it runs in.
  void append(Encoder& encoder, uint64_t layer, const Tensor& k, const Tensor& v) const;
  // rope (or norm_rope) of q and k, then append, in one command: see rope_append(). Positions are
  // those of the step, unless they are given.
  void rope_append(Encoder& encoder, uint64_t layer, const RopeAppendInputs& inputs,
                   const RopeAppendOptions& options = {}) const;
  // The queries are the newest tokens, at most those of the step, with masks and options as in
  // attention().
  void attend(Encoder& encoder, uint64_t layer, const AttendInputs& inputs,
              const AttendOptions& options = {}) const;

  // The step is complete: every layer has its tokens. The next begin_step() checks that as well;
  // a caller whose own CUDA graph captured append() must say KvStepEnd::captured.
  void end_step(KvStepEnd how = KvStepEnd::checked);

  // Drops the newest. A step that lacks layers can only be dropped whole.
  void rollback(Encoder& encoder, uint64_t tokens);
  void clear(Encoder& encoder);
  // A copy of its own, of what is submitted or recorded in the same encoder. capacity: 0 is this
  // cache's, and more makes room, unless the ring of a window or tail would have more slots.
  KvCache fork(Encoder& encoder, uint64_t capacity = 0) const;

  // A file with everything the cache holds; docs/snapshots.md draws it. Waits for what was
  // submitted; refused while something is recorded and not submitted. The file appears at `path` as
  // a whole: when save() throws, what was there before is still there. Only regular files are
  // replaced; links are followed.
  void save(const std::string& path) const;
  // The cache becomes the one that was saved. It must have the same geometry; a larger capacity is
  // fine, unless a ring would have more slots. A file that is damaged or does not fit is refused
  // and the cache stays as it was. Graphs recorded before go on with what was loaded; the next step
  // begins with begin_step().
  void load(const std::string& path);

 private:
  class GYRE_LOCAL State;
  explicit KvCache(std::unique_ptr<State> state);
  State& state() const;

  std::unique_ptr<State> state_;
};

}  // namespace gyre
