#include <nanobind/stl/filesystem.h>
#include <nanobind/stl/unique_ptr.h>

#include <atomic>
#include <filesystem>
#include <memory>

#include "attend.h"
#include "kv_calibration.h"
#include "kv_pages.h"
#include "rope_append.h"

namespace gyre::python {
namespace {

// A cache is used by one thread at a time; the GIL, which is let go during calls, does not see to
// that.
struct BoundKvCache {
  Device device;
  KvCache cache;
  std::atomic<bool> busy{false};

  BoundKvCache(Device home, KvCache taken) : device(std::move(home)), cache(std::move(taken)) {}
};

class Use {
 public:
  Use(BoundKvCache& bound, const char* what) : bound_(bound) {
    if (bound_.busy.exchange(true, std::memory_order_acquire))
      refuse(what, ": the cache is in use by another thread");
  }
  Use(const Use&) = delete;
  Use& operator=(const Use&) = delete;
  ~Use() { bound_.busy.store(false, std::memory_order_release); }

  KvCache& cache() const { return bound_.cache; }

 private:
  BoundKvCache& bound_;
};

std::string repr(const KvLayer& layer) {
  std::ostringstream text = plain_text();
  text << "gyre.KvLayer(k=\"" << name(layer.k) << "\", v=\"" << name(layer.v)
       << "\", window=" << layer.window << ", tail=" << layer.tail
       << ", sink_tokens=" << layer.sink_tokens;
  const auto given = [&](const char* what, uint64_t value) {
    if (value != 0) text << ", " << what << "=" << value;
  };
  given("kv_heads", layer.kv_heads);
  given("head_dim", layer.head_dim);
  given("v_head_dim", layer.v_head_dim);
  if (layer.kv_shared_layer_index)
    text << ", kv_shared_layer_index=" << *layer.kv_shared_layer_index;
  if (layer.latent) text << ", latent=True";
  text << ")";
  return text.str();
}

template <KvFormat KvLayer::*Member>
std::string format_of(const KvLayer& layer) {
  return std::string(name(layer.*Member));
}

void bind_layers(nb::module_& module) {
  nb::class_<KvLayer>(module, "KvLayer", "What one layer of a cache stores.")
      .def(
          "__init__",
          [](KvLayer* self, const std::string& k, const std::string& v, uint64_t window,
             uint64_t tail, uint64_t sink_tokens, uint64_t kv_heads, uint64_t head_dim,
             uint64_t v_head_dim, std::optional<uint64_t> kv_shared_layer_index, bool latent) {
            new (self) KvLayer{kv_format(k),          kv_format(v), window,   tail,
                               sink_tokens,           kv_heads,     head_dim, v_head_dim,
                               kv_shared_layer_index, latent};
          },
          "k"_a = "tq8", "v"_a = "tq4", "window"_a = 0, "tail"_a = 0, "sink_tokens"_a = 0,
          nb::kw_only(), "kv_heads"_a = 0, "head_dim"_a = 0, "v_head_dim"_a = 0,
          "kv_shared_layer_index"_a = nb::none(), "latent"_a = false,
          "k and v name formats, see kv_formats(). window is the number of keys that a query sees, "
          "its own included; 0 means all. tail is the number of newest keys that a query sees in "
          "f16; older keys are compressed. The first sink_tokens tokens stay in f16. A kv_heads, "
          "head_dim or v_head_dim of 0 is what the cache or pool gives for all layers; a "
          "v_head_dim of 0 is the layer's head_dim if it gives one. A layer with a "
          "kv_shared_layer_index has no K and V and attends over those of that earlier layer; its "
          "other arguments can be left out. A latent layer (MLA) has one KV head: k is the latent, "
          "which is V as well, of head_dim coordinates, and v the rotary part of K, of v_head_dim.")
      .def_prop_ro("k", format_of<&KvLayer::k>, "The format of K.")
      .def_prop_ro("v", format_of<&KvLayer::v>, "The format of V.")
      .def_ro("window", &KvLayer::window, "The number of keys that a query sees; 0 for all.")
      .def_ro("tail", &KvLayer::tail, "The number of newest keys that a query sees in f16.")
      .def_ro("sink_tokens", &KvLayer::sink_tokens, "The number of first tokens that stay in f16.")
      .def_ro("kv_heads", &KvLayer::kv_heads, "The number of KV heads; 0 for the cache's.")
      .def_ro("head_dim", &KvLayer::head_dim, "The coordinates of a head of K; 0 for the cache's.")
      .def_ro("v_head_dim", &KvLayer::v_head_dim,
              "The coordinates of a head of V; 0 for the default.")
      .def_ro("kv_shared_layer_index", &KvLayer::kv_shared_layer_index,
              "The earlier layer whose K and V it attends over, or None.")
      .def_ro("latent", &KvLayer::latent, "Whether it holds the latent of MLA.")
      .def(
          "__eq__",
          [](const KvLayer& a, nb::handle other) {
            return nb::isinstance<KvLayer>(other) && a == nb::cast<const KvLayer&>(other);
          },
          "other"_a.sig("other: object"))
      .def("__hash__", [](const KvLayer& self) { return std::hash<std::string>()(repr(self)); })
      .def("__repr__", [](const KvLayer& self) { return repr(self); });

  nb::class_<KvLayerInfo>(module, "KvLayerInfo", "What a layer of a cache stores on this device.")
      .def_ro("layer", &KvLayerInfo::layer, "The layer with every number filled in.")
      .def_ro("slots", &KvLayerInfo::slots,
              "The slots of the body: the capacity, or the ring of a window.")
      .def_ro("nbytes", &KvLayerInfo::bytes,
              "The bytes, including sink_tokens and tail; 0 if it shares another layer's cache.")
      .def_ro("kernel", &KvLayerInfo::kernel, "The kernels that attend over it on this device.")
      .def_ro("calibration", &KvLayerInfo::calibration,
              "A checksum of its calibration; 0 if it has none.")
      .def("__repr__", [](const KvLayerInfo& self) {
        std::ostringstream text = plain_text();
        text << "gyre.KvLayerInfo(" << repr(self.layer) << ", slots=" << self.slots
             << ", nbytes=" << self.bytes << ", kernel=\"" << self.kernel << "\")";
        return text.str();
      });

  module.def(
      "kv_layers",
      [](uint64_t count, const KvLayer& layer, uint64_t edge_layers, const std::string& edge_format,
         uint64_t window, uint64_t full_every, const std::string& window_format,
         uint64_t kv_shared_layers) {
        return kv_layers(count, {.layer = layer,
                                 .edge_layers = edge_layers,
                                 .edge_format = kv_format(edge_format),
                                 .window = window,
                                 .full_every = full_every,
                                 .window_format = kv_format(window_format),
                                 .kv_shared_layers = kv_shared_layers});
      },
      "count"_a, "layer"_a = kDefaultKvLayer, nb::kw_only(), "edge_layers"_a = 0,
      "edge_format"_a = "tq8", "window"_a = 0, "full_every"_a = 0, "window_format"_a = "f16",
      "kv_shared_layers"_a = 0,
      "Returns the usual choices for a whole model: most layers as `layer`, edge_layers at each "
      "end in edge_format, and where full_every is not 0, every full_every-th layer sees all keys "
      "while the others have a window in window_format. The last kv_shared_layers layers share the "
      "cache of the last layer before them with the same window.");
}

Operand attend(BoundKvCache& self, Encoder& encoder, uint64_t layer, const Operand& q,
               const OptionalOperand& out, std::optional<float> scale, bool causal, uint64_t window,
               float soft_cap, const OptionalOperand& sink_logits,
               const OptionalOperand& alibi_slopes, const OptionalOperand& lse,
               const OptionalOperand& tree_mask, BoundScratch* scratch) {
  const Use use(self, "cache.attend");
  const Operands operand(encoder, "cache.attend");
  const UsedScratch memory(scratch, "cache.attend");
  const Tensor queries = operand("q", q);
  const Written to = operand.written("out", out, queries.dtype(),
                                     attend_shape(queries, use.cache().layers(), layer));
  const AttendInputs inputs{
      .q = queries, .out = to.tensor, .lse = operand("lse", lse), .scratch = memory.tensor()};
  const AttendOptions options{.scale = scale,
                              .mask = {.causal = causal,
                                       .window = window,
                                       .soft_cap = soft_cap,
                                       .alibi_slopes = operand("alibi_slopes", alibi_slopes),
                                       .tree_mask = operand("tree_mask", tree_mask),
                                       .sink_logits = operand("sink_logits", sink_logits)}};
  without_gil([&] { use.cache().attend(encoder, layer, inputs, options); });
  return to.result;
}

void append(BoundKvCache& self, Encoder& encoder, uint64_t layer, const Operand& k,
            const Operand& v) {
  const Use use(self, "cache.append");
  const Operands operand(encoder, "cache.append");
  const Tensor k_tensor = operand("k", k), v_tensor = operand("v", v);
  without_gil([&] { use.cache().append(encoder, layer, k_tensor, v_tensor); });
}

std::unique_ptr<BoundKvCache> fork(BoundKvCache& self, Encoder& encoder, uint64_t capacity) {
  const Use use(self, "cache.fork");
  return std::make_unique<BoundKvCache>(
      self.device, without_gil([&] { return use.cache().fork(encoder, capacity); }));
}

std::string repr(BoundKvCache& self) {
  const Use use(self, "cache.__repr__");
  const KvCacheOptions& options = use.cache().options();
  std::ostringstream text = plain_text();
  text << "gyre.KvCache(" << use.cache().length() << " of " << options.capacity
       << " tokens, layers=" << options.layers.size() << ", kv_heads=" << options.kv_heads
       << ", head_dim=" << options.head_dim << ", nbytes=" << use.cache().bytes()
       << ", device=" << self.device.info().name << ")";
  return text.str();
}

void bind_rope_append(nb::class_<BoundKvCache>& cache) {
  constexpr const char* kOp = "cache.rope_append";
  const auto record = [](BoundKvCache& self, Encoder& encoder, uint64_t layer, const Operand& k,
                         const Operand& v, const Operands& operand, RopeAppendInputs& inputs,
                         const RopeAppendOptions& options) {
    const Use use(self, kOp);
    inputs.k = operand("k", k), inputs.v = operand("v", v);
    without_gil([&] { use.cache().rope_append(encoder, layer, inputs, options); });
  };
  with_rope_append_arguments([&](const auto&... arguments) {
    cache.def("rope_append",
              rope_append_call(
                  kOp, Types<BoundKvCache&, Encoder&, uint64_t, const Operand&, const Operand&>{},
                  Types<>{}, record),
              "encoder"_a, "layer"_a, "k"_a, "v"_a, arguments...,
              "Records rope(), or norm_rope() with norm=True, of q and k and then append(), as one "
              "command, and returns q_out. positions defaults to those of the step. The other "
              "arguments are those of "
              "gyre.rope_append().");
  });
}

void bind_steps(nb::class_<BoundKvCache>& cache) {
  cache
      .def(
          "begin_step",
          [](BoundKvCache& self, Encoder& encoder, uint64_t tokens) {
            const Use use(self, "cache.begin_step");
            without_gil([&] { use.cache().begin_step(encoder, tokens); });
          },
          "encoder"_a, "tokens"_a,
          "Begins the next tokens: sets their positions and expects append() for every layer. "
          "Refused while a layer lacks the tokens of the step before. It applies to one moment, so "
          "a graph cannot hold it.")
      .def(
          "positions",
          [](BoundKvCache& self, uint64_t tokens) {
            const Use use(self, "cache.positions");
            return BoundTensor{self.device, use.cache().positions(tokens)};
          },
          "tokens"_a,
          "Returns the positions of the tokens of the last begin_step(): i32 [tokens], for rope().")
      .def(
          "end_step",
          [](BoundKvCache& self, bool captured) {
            Use(self, "cache.end_step").cache().end_step(step_end(captured));
          },
          nb::kw_only(), "captured"_a = false,
          "Ends the step: every layer must have its tokens. captured says that a CUDA graph of "
          "yours captured the append() calls, so the cache does not see them run.")
      .def("append", append, "encoder"_a, "layer"_a, "k"_a, "v"_a,
           "Stores the tokens of the step in which it runs, which need not have begun when it is "
           "recorded. k is [tokens, kv_heads, head_dim] and v [tokens, kv_heads, v_head_dim]; f32, "
           "f16 or bf16, with head_dim contiguous.")
      .def("attend", attend, "encoder"_a, "layer"_a, "q"_a, "out"_a = nb::none(),
           "scale"_a = nb::none(), "causal"_a = true, "window"_a = 0, "soft_cap"_a = 0.0f,
           "sink_logits"_a = nb::none(), "alibi_slopes"_a = nb::none(), "lse"_a = nb::none(),
           "tree_mask"_a = nb::none(), "scratch"_a = nb::none(),
           "Records attention of the newest tokens over all tokens so far and returns out. q is "
           "[tokens, heads, head_dim] and out [tokens, heads, v_head_dim]; f32, f16 or bf16. If "
           "you leave out `out`, a gyre.Tensor of q's dtype is made. A window of 0 is the layer's. "
           "scratch is an AttentionScratch that caches share whose calls run one after the other, "
           "latent layers and others one each; "
           "without one the cache keeps its own memory. The other arguments are those of "
           "attention().")
      .def(
          "rollback",
          [](BoundKvCache& self, Encoder& encoder, uint64_t tokens) {
            const Use use(self, "cache.rollback");
            without_gil([&] { use.cache().rollback(encoder, tokens); });
          },
          "encoder"_a, "tokens"_a, "Drops the newest `tokens` tokens.")
      .def(
          "clear",
          [](BoundKvCache& self, Encoder& encoder) {
            const Use use(self, "cache.clear");
            without_gil([&] { use.cache().clear(encoder); });
          },
          "encoder"_a, "Drops all tokens.")
      .def("fork", fork, "encoder"_a, "capacity"_a = 0,
           "Returns a copy with memory of its own. capacity 0 is this cache's; a larger one makes "
           "room, unless the ring of a window or tail would need more slots.");
}

void bind_files(nb::class_<BoundKvCache>& cache) {
  cache
      .def(
          "save",
          [](BoundKvCache& self, const std::filesystem::path& path) {
            const Use use(self, "cache.save");
            without_gil([&] { use.cache().save(path.string()); });
          },
          "path"_a, nb::sig("def save(self, path: str | os.PathLike[str]) -> None"),
          "Writes a file with everything the cache holds, as a whole or not at all. Waits for "
          "submitted work; refused while recorded work is not submitted.")
      .def(
          "load",
          [](BoundKvCache& self, const std::filesystem::path& path) {
            const Use use(self, "cache.load");
            without_gil([&] { use.cache().load(path.string()); });
          },
          "path"_a, nb::sig("def load(self, path: str | os.PathLike[str]) -> None"),
          "Replaces the contents of the cache by those of a file. A file that is damaged or does "
          "not fit is refused, and the cache stays as it was. Refused while recorded work is not "
          "submitted.");
}

}  // namespace

void bind_kv_cache(nb::module_& module) {
  bind_layers(module);
  nb::class_<BoundKvCache> cache(
      module, "KvCache",
      "The KV cache of a model. A step is begin_step(), then append() and attend() for each layer. "
      "The length lies in device memory, so append() and attend() that were recorded once can be "
      "replayed for a whole generation, with a begin_step() submitted before each replay. One "
      "thread at a time may use it.");
  cache
      .def(
          "__init__",
          [](BoundKvCache* self, const DeviceLike& device, uint64_t kv_heads, uint64_t head_dim,
             uint64_t capacity, const std::vector<KvLayer>& layers, uint64_t v_head_dim,
             uint64_t step_tokens, const LayerCalibrations& calibration) {
            Device home = device_of(device);
            const KvCacheOptions options{.kv_heads = kv_heads,
                                         .head_dim = head_dim,
                                         .v_head_dim = v_head_dim,
                                         .capacity = capacity,
                                         .layers = layers,
                                         .step_tokens = step_tokens,
                                         .calibration = layer_calibrations(calibration)};
            KvCache made = without_gil([&] { return KvCache(home, options); });
            new (self) BoundKvCache(std::move(home), std::move(made));
          },
          "device"_a = "cpu", nb::kw_only(), "kv_heads"_a = 0, "head_dim"_a = 0, "capacity"_a,
          "layers"_a = std::vector<KvLayer>{kDefaultKvLayer}, "v_head_dim"_a = 0,
          "step_tokens"_a = 512, "calibration"_a = LayerCalibrations{},
          "capacity is the number of tokens in all. layers holds one KvLayer each. "
          "kv_heads, head_dim and v_head_dim are those of layers that give none; v_head_dim 0 is "
          "head_dim. step_tokens is the largest number of tokens of one begin_step(). calibration "
          "is a calibration of gyre.calibrate, or for each layer a pair of KvCalibration (K, V) or "
          "None.")
      .def_prop_ro(
          "device", [](const BoundKvCache& self) { return self.device; },
          "The device of its memory.")
      .def_prop_ro(
          "length", [](BoundKvCache& self) { return Use(self, "cache.length").cache().length(); },
          "The number of tokens, as far as recorded.")
      .def(
          "__len__", [](BoundKvCache& self) { return Use(self, "cache.length").cache().length(); },
          "Returns the number of tokens.")
      .def_prop_ro(
          "nbytes", [](BoundKvCache& self) { return Use(self, "cache.nbytes").cache().bytes(); },
          "The bytes it takes, without the scratch memory of attend().")
      .def_prop_ro(
          "capacity", [](const BoundKvCache& self) { return self.cache.options().capacity; },
          "The largest number of tokens.")
      .def_prop_ro(
          "kv_heads", [](const BoundKvCache& self) { return self.cache.options().kv_heads; },
          "The KV heads of layers that give none.")
      .def_prop_ro(
          "head_dim", [](const BoundKvCache& self) { return self.cache.options().head_dim; },
          "The head_dim of layers that give none.")
      .def_prop_ro(
          "v_head_dim", [](const BoundKvCache& self) { return self.cache.options().v_head_dim; },
          "The v_head_dim of layers that give none.")
      .def_prop_ro(
          "step_tokens", [](const BoundKvCache& self) { return self.cache.options().step_tokens; },
          "The largest number of tokens of one begin_step().")
      .def_prop_ro(
          "layers", [](const BoundKvCache& self) { return self.cache.layers(); },
          "The layers, with every number filled in.")
      .def("__repr__", [](BoundKvCache& self) { return repr(self); })
      .def(
          "describe",
          [](BoundKvCache& self) { return Use(self, "cache.describe").cache().describe(); },
          "Returns what is stored, layer by layer.");
  bind_steps(cache);
  bind_rope_append(cache);
  bind_files(cache);
}

}  // namespace gyre::python
