#include <nanobind/stl/filesystem.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>

#include <filesystem>
#include <memory>

#include "attend.h"
#include "kv_calibration.h"
#include "rope_append.h"

// A pool, its sequences and its batches are used by one thread at a time: calls keep the GIL.
namespace gyre::python {
namespace {

struct BoundKvPool {
  Device device;
  KvPool pool;
};

struct BoundKvBatch {
  Device device;
  KvBatch batch;
  KvPool pool;
};

std::string repr(const KvGroupInfo& self) {
  std::ostringstream text = plain_text();
  text << "gyre.KvGroupInfo(" << self.name << ": " << self.used << " of " << self.pages
       << " pages used, " << self.shared << " shared, " << self.cached << " cached, "
       << self.layers.size() << " layers, page_bytes=" << self.page_bytes << ")";
  return text.str();
}

std::string repr(const BoundKvPool& self) {
  const KvPoolInfo info = self.pool.describe();
  std::ostringstream text = plain_text();
  text << "gyre.KvPool(sequences=" << info.sequences << ", ";
  for (const KvGroupInfo& group : info.groups)
    text << group.name << ": " << group.used << " of " << group.pages << " pages, ";
  text << "nbytes=" << info.bytes << ", device=" << self.device.info().name << ")";
  return text.str();
}

std::string repr(const BoundKvBatch& self) {
  const KvBatchOptions& options = self.batch.options();
  std::ostringstream text = plain_text();
  text << "gyre.KvBatch(max_sequences=" << options.max_sequences
       << ", max_tokens=" << options.max_tokens << ", max_query_length=" << options.max_query_length
       << ", max_kv_length=" << options.max_kv_length << ", device=" << self.device.info().name
       << ")";
  return text.str();
}

void bind_info(nb::module_& module) {
  nb::class_<KvGroupInfo>(module, "KvGroupInfo",
                          "Pages of layers that keep the same keys, and who holds them.")
      .def_ro("name", &KvGroupInfo::name,
              "What its layers keep, for example \"all keys\" or \"window 1024\".")
      .def_ro("layers", &KvGroupInfo::layers, "The numbers of its layers.")
      .def_ro("page_bytes", &KvGroupInfo::page_bytes, "The bytes of a page of all its layers.")
      .def_ro("pages", &KvGroupInfo::pages, "The number of used, cached and free pages together.")
      .def_ro("used", &KvGroupInfo::used, "The number of pages that a sequence holds.")
      .def_ro("shared", &KvGroupInfo::shared,
              "The number of pages that several sequences hold; `used` counts them, too.")
      .def_ro("cached", &KvGroupInfo::cached,
              "The number of pages that only the prefix index holds.")
      .def_ro("free", &KvGroupInfo::free, "The number of free pages.")
      .def("__repr__", [](const KvGroupInfo& self) { return repr(self); });
  nb::class_<KvPoolInfo>(module, "KvPoolInfo", "What a pool holds.")
      .def_ro("groups", &KvPoolInfo::groups, "The groups of layers that keep the same keys.")
      .def_ro("nbytes", &KvPoolInfo::bytes, "The bytes of all pages.")
      .def_ro("used_nbytes", &KvPoolInfo::used_bytes, "The bytes of the pages that sequences hold.")
      .def_ro("sequences", &KvPoolInfo::sequences, "The number of sequences.")
      .def_ro("prefixes", &KvPoolInfo::prefixes, "The number of pages that the prefix index knows.")
      .def_ro("evictions", &KvPoolInfo::evictions,
              "The number of pages taken from the prefix index so far.")
      .def_ro("calibration", &KvPoolInfo::calibration,
              "A checksum of the calibration that its pages are written with; 0 for none.");
}

void bind_sequence(nb::module_& module) {
  nb::class_<KvSequence>(module, "KvSequence",
                         "Keys and values of one sequence: pages of its pool, which it returns "
                         "when it is dropped. KvPool.sequence(), KvPool.match() and fork() make "
                         "one.")
      .def_prop_ro("length", &KvSequence::length,
                   "The number of tokens, including those of a step that has begun.")
      .def("__len__", &KvSequence::length, "Returns the number of tokens.")
      .def(
          "fork", [](const KvSequence& self) { return std::make_unique<KvSequence>(self.fork()); },
          "Returns a sequence that shares all pages; the first write to a shared page copies it.")
      .def("rollback", &KvSequence::rollback, "tokens"_a, "Drops the newest `tokens` tokens.")
      .def("clear", &KvSequence::clear, "Drops all tokens.")
      .def("__repr__", [](const KvSequence& self) {
        return "gyre.KvSequence(" + std::to_string(self.length()) + " tokens)";
      });
}

void bind_files(nb::class_<BoundKvPool>& pool) {
  using Path = std::filesystem::path;
  pool.def(
          "export_page",
          [](const BoundKvPool& self, const KvSequence& sequence, uint64_t page) {
            const std::vector<std::byte> bytes = self.pool.export_page(sequence, page);
            return nb::bytes(bytes.data(), bytes.size());
          },
          "sequence"_a, "page"_a, "Returns a page of all layers as bytes, with a checksum.")
      .def(
          "import_page",
          [](const BoundKvPool& self, KvSequence& sequence, const nb::bytes& page) {
            self.pool.import_page(sequence,
                                  {static_cast<const std::byte*>(page.data()), page.size()});
          },
          "sequence"_a, "page"_a, "Appends a page to a sequence; pages come in order.")
      .def(
          "save",
          [](const BoundKvPool& self, const KvSequence& sequence, const Path& path) {
            self.pool.save(sequence, path.string());
          },
          "sequence"_a, "path"_a,
          nb::sig("def save(self, sequence: KvSequence, path: str | os.PathLike[str]) -> None"),
          "Writes a file, as a whole or not at all.")
      .def(
          "load",
          [](const BoundKvPool& self, const Path& path) {
            return std::make_unique<KvSequence>(self.pool.load(path.string()));
          },
          "path"_a, nb::sig("def load(self, path: str | os.PathLike[str]) -> KvSequence"),
          "Returns the sequence that was saved. A damaged file, or one of another pool, is "
          "refused.")
      .def(
          "save_prefixes",
          [](const BoundKvPool& self, const Path& path) { self.pool.save_prefixes(path.string()); },
          "path"_a, nb::sig("def save_prefixes(self, path: str | os.PathLike[str]) -> None"),
          "Writes a file with what the prefix index knows.")
      .def(
          "load_prefixes",
          [](const BoundKvPool& self, const Path& path) {
            return self.pool.load_prefixes(path.string());
          },
          "path"_a, nb::sig("def load_prefixes(self, path: str | os.PathLike[str]) -> int"),
          "Adds a file to the prefix index and returns how many pages were new.");
}

void bind_pool(nb::module_& module) {
  nb::class_<BoundKvPool> bound(module, "KvPool",
                                "Device memory for the pages of all layers, the sequences that "
                                "hold them, and an index of prefixes.");
  bind_files(bound);
  bound
      .def(
          "__init__",
          [](BoundKvPool* self, const DeviceLike& device, uint64_t kv_heads, uint64_t head_dim,
             uint64_t pages, const std::vector<KvLayer>& layers, uint64_t v_head_dim,
             uint64_t page_tokens, uint64_t sequences, uint64_t step_tokens,
             const LayerCalibrations& calibration) {
            Device home = device_of(device);
            KvPool pool(home, {.kv_heads = kv_heads,
                               .head_dim = head_dim,
                               .v_head_dim = v_head_dim,
                               .layers = layers,
                               .pages = pages,
                               .page_tokens = page_tokens,
                               .sequences = sequences,
                               .step_tokens = step_tokens,
                               .calibration = layer_calibrations(calibration)});
            new (self) BoundKvPool{std::move(home), std::move(pool)};
          },
          "device"_a = "cpu", nb::kw_only(), "kv_heads"_a = 0, "head_dim"_a = 0, "pages"_a,
          "layers"_a = std::vector<KvLayer>{kDefaultKvLayer}, "v_head_dim"_a = 0,
          "page_tokens"_a = 64, "sequences"_a = 64, "step_tokens"_a = 512,
          "calibration"_a = LayerCalibrations{},
          "kv_heads, head_dim and v_head_dim are those of KvCache. "
          "pages is the number of pages of the layers that see all keys. Layers with a window, "
          "tails and sink_tokens get as many as `sequences` sequences need that take step_tokens "
          "tokens in one step. calibration is that of KvCache.")
      .def_prop_ro(
          "device", [](const BoundKvPool& self) { return self.device; }, "The device of its pages.")
      .def_prop_ro(
          "layers", [](const BoundKvPool& self) { return self.pool.layers(); },
          "The layers, with every number filled in.")
      .def(
          "describe", [](const BoundKvPool& self) { return self.pool.describe(); },
          "Returns who holds the pages, group by group.")
      .def(
          "sequence",
          [](const BoundKvPool& self) {
            return std::make_unique<KvSequence>(self.pool.sequence());
          },
          "Returns an empty sequence.")
      .def(
          "publish",
          [](const BoundKvPool& self, const KvSequence& sequence,
             const std::vector<int32_t>& tokens) { self.pool.publish(sequence, tokens); },
          "sequence"_a, "tokens"_a,
          "Makes the full pages of a sequence known under its tokens, so that match() can share "
          "them.")
      .def(
          "match",
          [](const BoundKvPool& self, const std::vector<int32_t>& tokens) {
            return std::make_unique<KvSequence>(self.pool.match(tokens));
          },
          "tokens"_a,
          "Returns a sequence that begins with the longest known prefix, in whole pages.")
      .def(
          "forget", [](const BoundKvPool& self) { self.pool.forget(); },
          "Empties the prefix index.")
      .def("__repr__", [](const BoundKvPool& self) { return repr(self); });
}

using Step =
    std::variant<std::pair<KvSequence*, uint64_t>, std::tuple<KvSequence*, uint64_t, bool>>;

KvStep step_of(const Step& given) {
  const auto step = [](KvSequence* sequence, uint64_t tokens, bool is_prefill) -> KvStep {
    if (sequence == nullptr) refuse("kv_batch.begin_step: a sequence is None");
    return {*sequence, tokens, is_prefill};
  };
  if (const auto* two = std::get_if<0>(&given)) return step(two->first, two->second, false);
  const auto& [sequence, tokens, is_prefill] = std::get<1>(given);
  return step(sequence, tokens, is_prefill);
}

Operand attend(const BoundKvBatch& self, Encoder& encoder, uint64_t layer, const Operand& q,
               const OptionalOperand& out, const std::optional<float>& scale, bool causal,
               uint64_t window, float soft_cap, const OptionalOperand& sink_logits,
               const OptionalOperand& alibi_slopes, const OptionalOperand& lse) {
  const Operands operand(encoder, "batch.attend");
  const Tensor queries = operand("q", q);
  const Written to = operand.written("out", out, queries.dtype(),
                                     attend_shape(queries, self.pool.layers(), layer));
  self.batch.attend(encoder, layer, {.q = queries, .out = to.tensor, .lse = operand("lse", lse)},
                    {.scale = scale,
                     .mask = {.causal = causal,
                              .window = window,
                              .soft_cap = soft_cap,
                              .alibi_slopes = operand("alibi_slopes", alibi_slopes),
                              .sink_logits = operand("sink_logits", sink_logits)}});
  return to.result;
}

void bind_rope_append(nb::class_<BoundKvBatch>& batch) {
  constexpr const char* kOp = "batch.rope_append";
  const auto record = [](BoundKvBatch& self, Encoder& encoder, uint64_t layer, const Operand& k,
                         const Operand& v, const Operands& operand, RopeAppendInputs& inputs,
                         const RopeAppendOptions& options) {
    inputs.k = operand("k", k), inputs.v = operand("v", v);
    self.batch.rope_append(encoder, layer, inputs, options);
  };
  with_rope_append_arguments([&](const auto&... arguments) {
    batch.def("rope_append",
              rope_append_call(
                  kOp, Types<BoundKvBatch&, Encoder&, uint64_t, const Operand&, const Operand&>{},
                  Types<>{}, record),
              "encoder"_a, "layer"_a, "k"_a, "v"_a, arguments...,
              "Records rope(), or norm_rope() with norm=True, of q and k and then append(), as one "
              "command for each kind of pages that the layer has, and returns q_out. positions "
              "defaults to those of "
              "the step. The other arguments are those of gyre.rope_append().");
  });
}

void bind_batch(nb::module_& module) {
  nb::class_<BoundKvBatch> batch(
      module, "KvBatch",
      "The tokens of several sequences that one forward pass works on, in rows one after the "
      "other. A step is begin_step(), then append() and attend() for each layer. Tables and "
      "lengths lie in device memory, so append() and attend() that were recorded once serve every "
      "step within the bounds.");
  bind_rope_append(batch);
  batch
      .def(
          "__init__",
          [](BoundKvBatch* self, const BoundKvPool& pool, uint64_t max_sequences,
             uint64_t max_tokens, uint64_t max_query_length, uint64_t max_kv_length) {
            new (self) BoundKvBatch{pool.device,
                                    KvBatch(pool.pool, {.max_sequences = max_sequences,
                                                        .max_tokens = max_tokens,
                                                        .max_query_length = max_query_length,
                                                        .max_kv_length = max_kv_length}),
                                    pool.pool};
          },
          "pool"_a, nb::kw_only(), "max_sequences"_a = 64, "max_tokens"_a = 512,
          "max_query_length"_a = 0, "max_kv_length"_a = 0,
          "The arguments are upper bounds of every step. max_tokens counts those of all sequences "
          "together, max_query_length those of one sequence; 0 means max_tokens. max_kv_length "
          "counts the tokens of a sequence, those of the step included; 0 means all that the pool "
          "holds.")
      .def(
          "begin_step",
          [](BoundKvBatch& self, Encoder& encoder, const std::vector<Step>& steps) {
            std::vector<KvStep> list;
            list.reserve(steps.size());
            for (const Step& step : steps) list.push_back(step_of(step));
            self.batch.begin_step(encoder, list);
          },
          "encoder"_a, "steps"_a,
          "Begins a step. steps holds (sequence, tokens) or (sequence, tokens, is_prefill) each. "
          "Takes the pages they need, all or none. Submit it before anything of the step; a graph "
          "cannot hold it.")
      .def_prop_ro(
          "tokens", [](const BoundKvBatch& self) { return self.batch.tokens(); },
          "The number of rows of the step.")
      .def(
          "positions",
          [](const BoundKvBatch& self, uint64_t rows) {
            return BoundTensor{self.device, self.batch.positions(rows)};
          },
          "rows"_a = 0, "Returns the positions of the step's tokens: i32 [rows], for rope().")
      .def(
          "append",
          [](BoundKvBatch& self, Encoder& encoder, uint64_t layer, const Operand& k,
             const Operand& v) {
            const Operands operand(encoder, "batch.append");
            self.batch.append(encoder, layer, operand("k", k), operand("v", v));
          },
          "encoder"_a, "layer"_a, "k"_a, "v"_a,
          "Stores the tokens of the step. k is [rows, kv_heads, head_dim] and v [rows, kv_heads, "
          "v_head_dim], f32, f16 or bf16; rows beyond the step's tokens are skipped.")
      .def("attend", attend, "encoder"_a, "layer"_a, "q"_a, "out"_a = nb::none(),
           "scale"_a = nb::none(), "causal"_a = true, "window"_a = 0, "soft_cap"_a = 0.0f,
           "sink_logits"_a = nb::none(), "alibi_slopes"_a = nb::none(), "lse"_a = nb::none(),
           "Records attention of the step's tokens and returns out. The arguments are those of "
           "paged_attention(); a window of 0 is the layer's.")
      .def(
          "record", [](BoundKvBatch& self) { self.batch.record(); },
          "Begins a recording: append() and attend() record a step for a graph, although none has "
          "begun.")
      .def(
          "end_step",
          [](BoundKvBatch& self, bool captured) { self.batch.end_step(step_end(captured)); },
          nb::kw_only(), "captured"_a = false,
          "Ends a recording, or a step that a graph replayed: every layer must have its tokens. "
          "captured says that a CUDA graph of yours captured the recording, so the batch does not "
          "see it run.")
      .def(
          "rollback", [](BoundKvBatch& self) { self.batch.rollback(); },
          "Takes back the step that has begun: its sequences have the tokens they had before.")
      .def("__repr__", [](const BoundKvBatch& self) { return repr(self); });
}

}  // namespace

void bind_kv_pool(nb::module_& module) {
  bind_info(module);
  bind_sequence(module);
  bind_pool(module);
  bind_batch(module);
}

}  // namespace gyre::python
