#include "stress/allocation_programs.h"

#include <cmath>
#include <filesystem>
#include <sstream>
#include <stdexcept>

namespace gyre::test {
namespace {

constexpr uint64_t kHeads = 4, kKvHeads = 2, kDim = 32;

class Output {
 public:
  void add(const void* data, size_t bytes) {
    const auto* const from = static_cast<const uint8_t*>(data);
    bytes_.insert(bytes_.end(), from, from + bytes);
  }
  void add(uint64_t number) { add(&number, sizeof(number)); }
  void add(const Tensor& tensor) {
    const std::span<const float> values = tensor.data<const float>();
    add(values.data(), values.size_bytes());
  }
  std::vector<uint8_t> take() { return std::move(bytes_); }

 private:
  std::vector<uint8_t> bytes_;
};

Device open_device() {
  const DeviceOptions options{.threads = 3, .spin_us = 5};
  return survive([&] { return Device::open("cpu", options); });
}

Tensor filled(const Device& device, const Dims& shape, uint32_t seed) {
  const Tensor tensor = survive([&] { return device.tensor(DType::f32, shape); });
  uint32_t at = seed;
  for (float& value : tensor.data<float>())
    value = std::sin(static_cast<float>(at++) * 0.37f + static_cast<float>(seed));
  return tensor;
}

void submit(Encoder& encoder) {
  survive(encoder, [&] { encoder.submit().wait(); });
}

void run_codec(const Device& device, Encoder& encoder, Output& output) {
  constexpr uint64_t kTokens = 300;
  const Tensor k = filled(device, {kTokens, kKvHeads, kDim}, 1);
  const Tensor v = filled(device, {kTokens, kKvHeads, kDim}, 2);
  const Tensor q = filled(device, {8, kHeads, kDim}, 3), out = filled(device, {8, kHeads, kDim}, 0);
  const Tensor back = filled(device, {kTokens, kKvHeads, kDim}, 0);
  const Tensor copy = filled(device, {kTokens, kKvHeads, kDim}, 0);
  const auto buffer = [&](KvFormat format, KvRole role) {
    const KvShape shape{format, role, kKvHeads, kTokens, kDim};
    return survive([&] { return KvBuffer::allocate(device, shape); });
  };
  const KvBuffer k_cache = buffer(KvFormat::tq8, KvRole::k);
  const KvBuffer v_cache = buffer(KvFormat::tq4, KvRole::v);
  const Dims partial_shape = attention_partial_shape(3, q.shape(), kDim);
  const Tensor partial = filled(device, partial_shape, 0);
  survive(encoder, [&] { kv_copy(encoder, {.k = k, .k_cache = copy}); });
  survive(encoder, [&] { hadamard(encoder, {.x = copy, .out = copy}); });
  survive(encoder, [&] { kv_quantize(encoder, {k, k_cache, v, v_cache}); });
  survive(encoder, [&] { kv_dequantize(encoder, {k_cache, back}); });
  const AttentionOptions with{.length = kTokens, .scale = 0.2f};
  survive(encoder, [&] { attention(encoder, {q, k_cache, v_cache, out}, with); });
  submit(encoder);
  output.add(copy);
  output.add(back);
  output.add(out);
  survive(encoder, [&] { attention_partial(encoder, {q, k_cache, v_cache, partial}, with); });
  survive(encoder, [&] { attention_merge(encoder, {partial, out, {}, {}}); });
  const Graph graph = survive(encoder, [&] { return encoder.instantiate(); });
  survive([&] { graph.replay().wait(); });
  output.add(out);
}

void run_rope(const Device& device, Encoder& encoder, Output& output) {
  const Tensor x = filled(device, {8, kHeads, kDim}, 4);
  const Tensor positions = survive([&] { return device.tensor(DType::i32, {8}); });
  for (int32_t i = 0; i < 8; ++i) positions.data<int32_t>()[static_cast<size_t>(i)] = 7 * i;
  const RopeConfig config{.rotary_dim = kDim};
  const RopeFrequencies frequencies = survive([&] { return rope_frequencies(config); });
  output.add(frequencies.inverse.size());
  survive(encoder, [&] { rope(encoder, {.x = x, .positions = positions, .out = x}); });
  survive([&] { device.start_trace(); });
  submit(encoder);
  const Trace trace = survive([&] { return device.stop_trace(); });
  if (trace.events.size() + trace.dropped != 1) throw std::logic_error("a command was not traced");
  output.add(x);
}

constexpr uint64_t kSteps = 3, kStep = 4;

KvCacheOptions cache_options() {
  return {.kv_heads = kKvHeads,
          .head_dim = kDim,
          .capacity = 40,
          .layers = {{.k = KvFormat::tq8, .v = KvFormat::tq4, .tail = 8, .sink_tokens = 2},
                     {.k = KvFormat::f16, .v = KvFormat::f16, .window = 6}},
          .step_tokens = 8};
}

void run_step(KvCache& cache, Encoder& encoder, uint64_t tokens, Output& output) {
  const Device& device = encoder.device();
  const Tensor k = filled(device, {tokens, kKvHeads, kDim}, static_cast<uint32_t>(cache.length()));
  const Tensor q = filled(device, {tokens, kHeads, kDim}, 9);
  const Tensor out = filled(device, {tokens, kHeads, kDim}, 0);
  survive(encoder, [&] { cache.begin_step(encoder, tokens); });
  for (uint64_t layer = 0; layer < 2; ++layer) {
    survive(encoder, [&] { cache.append(encoder, layer, k, k); });
    survive(encoder, [&] { cache.attend(encoder, layer, {.q = q, .out = out}); });
    submit(encoder);
    output.add(out);
  }
}

KvPoolOptions pool_options() {
  return {.kv_heads = kKvHeads,
          .head_dim = kDim,
          .layers = {{.k = KvFormat::tq8, .v = KvFormat::tq4, .tail = 12, .sink_tokens = 4},
                     {.k = KvFormat::f16, .v = KvFormat::f16, .window = 20}},
          .pages = 24,
          .page_tokens = 8,
          .sequences = 6,
          .step_tokens = 32};
}

void run_batch(KvBatch& batch, Encoder& encoder, std::span<const KvStep> steps, Output& output) {
  const Device& device = encoder.device();
  survive(encoder, [&] { batch.begin_step(encoder, steps); });
  const uint64_t tokens = batch.tokens();
  const Tensor k = filled(device, {tokens, kKvHeads, kDim}, static_cast<uint32_t>(tokens));
  const Tensor q = filled(device, {tokens, kHeads, kDim}, 9);
  const Tensor out = filled(device, {tokens, kHeads, kDim}, 0);
  for (uint64_t layer = 0; layer < 2; ++layer) {
    survive(encoder, [&] { batch.append(encoder, layer, k, k); });
    survive(encoder, [&] { batch.attend(encoder, layer, {.q = q, .out = out}); });
    submit(encoder);
    output.add(out);
  }
}

// Writers of pages, and rope with its norm.
void run_pages(const Device& device, Encoder& encoder, Output& output) {
  constexpr uint64_t kTokens = 6;
  const Tensor k = filled(device, {kTokens, kKvHeads, kDim}, 5);
  const Tensor positions = survive([&] { return device.tensor(DType::i32, {kTokens}); });
  const Tensor slots = survive([&] { return device.tensor(DType::i32, {kTokens}); });
  for (int32_t i = 0; i < int32_t{kTokens}; ++i)
    slots.data<int32_t>()[static_cast<size_t>(i)] =
        positions.data<int32_t>()[static_cast<size_t>(i)] = i + 3;
  const KvPageShape shape{.kv_heads = kKvHeads, .head_dim = kDim, .page_tokens = 8};
  const KvPages pages = survive([&] { return KvPages::allocate(device, shape, 4); });
  survive(encoder, [&] { kv_write(encoder, {k, k, pages, slots, {}, {}}); });
  survive(encoder, [&] {
    rope_append(encoder, {.k = k, .v = k, .positions = positions}, {pages, slots, {}, {}});
  });
  const Tensor from = survive([&] { return device.tensor(DType::i32, {1}); });
  const Tensor to = survive([&] { return device.tensor(DType::i32, {1}); });
  to.data<int32_t>()[0] = 3;
  survive(encoder, [&] { kv_page_copy(encoder, {pages, from, to}); });
  survive(encoder, [&] { norm_rope(encoder, {.x = k, .positions = positions, .out = k}); });
  const Tensor matrix = filled(device, {kKvHeads, kDim, kDim}, 6);
  survive(encoder, [&] { kv_transform(encoder, {k, matrix, {}, {}, k}); });
  submit(encoder);
  output.add(pages.bytes.data<const uint8_t>().data(), pages.bytes.bytes());
  output.add(k);
}

void add_one(const void* /*params*/, const uint64_t* args, uint32_t task,
             uint32_t /*tasks*/) noexcept {
  // NOLINTNEXTLINE(performance-no-int-to-ptr)
  reinterpret_cast<float*>(args[0])[task] += 1;
}

void run_custom(const Device& device, Encoder& encoder, Output& output) {
  const Tensor x = filled(device, {8}, 7);
  const CustomCode code{
      .name = "add_one", .args = {{"x", Access::read_write}}, .params_bytes = 8, .cpu = add_one};
  const CustomKernel kernel = surviving_kernel(code);
  const uint64_t params = 0;
  survive(encoder, [&] {
    kernel.record(encoder, std::as_bytes(std::span(&params, 1)), {&x, 1}, {.tasks = 8});
  });
  submit(encoder);
  output.add(x);
}

}  // namespace

std::vector<uint8_t> run_calls(const std::string& folder) {
  Output output;
  const std::string path = folder + "/calls";
  const Device device = open_device();
  Encoder encoder = survive([&] { return Encoder(device); });
  run_pages(device, encoder, output);
  run_custom(device, encoder, output);
  float memory[4] = {1, 2, 3, 4};
  const Dims four = {4};
  output.add(survive([&] { return device.wrap(memory, DType::f32, four); }));
  output.add(survive([&] { return four.text(); }).size());
  output.add(survive([&] { return supports(device, KvQuantizeTypes{}); }) ? 1 : 0);
  const std::vector<double> radians(kDim / 2, 0.5);
  output.add(survive([&] { return rope_table(device, radians); }).bytes());
  const KvPolicy policy{.edge_layers = 1};
  output.add(survive([&] { return kv_layers(5, policy); }).size());
  const ModelShape model{
      .heads = kHeads, .kv_heads = kKvHeads, .head_dim = kDim, .context = 64, .step_tokens = 8};
  output.add(survive([&] { return prepare(device, model); }).size());
  const KvCacheOptions options = cache_options();
  KvCache cache = survive([&] { return KvCache(device, options); });
  const Tensor k = filled(device, {kStep, kKvHeads, kDim}, 8);
  survive(encoder, [&] { cache.begin_step(encoder, kStep); });
  for (uint64_t layer = 0; layer < 2; ++layer)
    survive(encoder, [&] { cache.rope_append(encoder, layer, {.k = k, .v = k}); });
  survive([&] { device.start_trace(); });
  submit(encoder);
  const Trace trace = survive([&] { return device.stop_trace(); });
  std::ostringstream text;
  survive([&] {
    text.str("");
    trace.write_table(text);
    trace.write_text(text);
    trace.write_chrome(text);
  });
  survive([&] { cache.save(path); });
  survive([&] { verify_snapshot(path); });
  const KvPoolOptions of_pool = pool_options();
  const KvPool pool = survive([&] { return KvPool(device, of_pool); });
  KvBatch batch = survive([&] { return KvBatch(pool, {.max_sequences = 4, .max_tokens = 64}); });
  KvSequence sequence = survive([&] { return pool.sequence(); });
  const std::vector<KvStep> steps = {{sequence, kStep}};
  survive(encoder, [&] { batch.begin_step(encoder, steps); });
  for (uint64_t layer = 0; layer < 2; ++layer)
    survive(encoder, [&] { batch.rope_append(encoder, layer, {.k = k, .v = k}); });
  submit(encoder);
  output.add(sequence.length());
  return output.take();
}

std::vector<uint8_t> run_ops(const std::string& /*folder*/) {
  Output output;
  const Device device = open_device();
  {
    Encoder encoder = survive([&] { return Encoder(device); });
    run_codec(device, encoder, output);
    run_rope(device, encoder, output);
    output.add(survive([&] { return device.kernels(); }).size());
    output.add(survive([] { return devices(); }).empty() ? 1 : 0);
  }
  output.add(device.memory().in_use_bytes);  // nobody holds any but the device
  device.trim();
  return output.take();
}

std::vector<uint8_t> run_cache(const std::string& folder) {
  Output output;
  const std::string path = folder + "/cache";
  const Device device = open_device();
  {
    const KvCacheOptions options = cache_options();
    Encoder encoder = survive([&] { return Encoder(device); });
    KvCache cache = survive([&] { return KvCache(device, options); });
    for (uint64_t i = 0; i < kSteps; ++i) run_step(cache, encoder, kStep, output);
    KvCache copy = survive(encoder, [&] { return cache.fork(encoder, 48); });
    submit(encoder);
    run_step(copy, encoder, kStep, output);
    survive([&] { copy.save(path); });
    const std::string link = path + "_link";
    std::filesystem::remove(link);
    std::filesystem::create_symlink(path, link);
    survive([&] { copy.save(link); });
    output.add(survive([&] { return inspect_snapshot(path); }).length);
    KvCacheOptions larger = cache_options();
    larger.capacity = 48;
    KvCache loaded = survive([&] { return KvCache(device, larger); });
    survive([&] { loaded.load(path); });
    run_step(loaded, encoder, 2, output);
    survive(encoder, [&] { loaded.rollback(encoder, 2); });
    submit(encoder);
    run_step(loaded, encoder, 1, output);
    output.add(survive([&] { return loaded.describe(); }).size());
    survive(encoder, [&] { cache.clear(encoder); });
    submit(encoder);
    output.add(cache.length());
  }
  output.add(device.memory().in_use_bytes);  // nobody holds any but the device
  return output.take();
}

std::vector<uint8_t> run_pool(const std::string& folder) {
  Output output;
  const Device device = open_device();
  const std::string sequence_path = folder + "/sequence", prefix_path = folder + "/prefixes";
  std::vector<int32_t> tokens(32);
  for (size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<int32_t>(i);
  {
    const KvPoolOptions options = pool_options();
    Encoder encoder = survive([&] { return Encoder(device); });
    const KvPool pool = survive([&] { return KvPool(device, options); });
    KvBatch batch = survive([&] { return KvBatch(pool, {.max_sequences = 4, .max_tokens = 64}); });
    KvSequence a = survive([&] { return pool.sequence(); });
    run_batch(batch, encoder, std::vector<KvStep>{{a, 19, true}}, output);
    survive([&] { pool.publish(a, std::span(tokens).first(19)); });
    KvSequence b = survive([&] { return a.fork(); });
    KvSequence c = survive([&] { return pool.match(tokens); });
    output.add(c.length());
    run_batch(batch, encoder, std::vector<KvStep>{{a, 1}, {b, 3}, {c, 5}}, output);
    survive([&] { pool.save(b, sequence_path); });
    survive([&] { pool.save_prefixes(prefix_path); });
    KvSequence d = survive([&] { return pool.load(sequence_path); });
    KvSequence e = survive([&] { return pool.sequence(); });
    const std::vector<std::byte> page = survive([&] { return pool.export_page(a, 0); });
    output.add(page.data(), page.size());
    survive([&] { pool.import_page(e, page); });
    run_batch(batch, encoder, std::vector<KvStep>{{d, 1}, {e, 1}}, output);
    pool.forget();
    output.add(survive([&] { return pool.load_prefixes(prefix_path); }));
    const KvPoolInfo info = survive([&] { return pool.describe(); });
    for (const KvGroupInfo& group : info.groups) {
      output.add(group.used);
      output.add(group.shared);
      output.add(group.cached);
      output.add(group.free);
    }
  }
  output.add(device.memory().in_use_bytes);  // nobody holds any but the device
  return output.take();
}

}  // namespace gyre::test
