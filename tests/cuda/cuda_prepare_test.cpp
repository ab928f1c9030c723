// prepare(): after it, a model's steps compile nothing. Runs with the fake driver and the
// fake NVRTC, so that every shape is cheap; skipped without a CUDA device.
#include <cstdlib>
#include <filesystem>

#include "cuda/kernel_folder.h"
#include "expect_error.h"
#include "gyre/gyre_c.h"
#include "gyre_test.h"

namespace gyre::test {
namespace {

namespace fs = std::filesystem;

bool is_fake(const DeviceInfo& info) {
  return info.available && info.description.starts_with("Fake GPU");
}

class Prepare : public KernelFolder {
 protected:
  Prepare() : KernelFolder("gyre_prepare") { setenv("GYRE_FAKE_GPU", "132", 1); }
  ~Prepare() override { unsetenv("GYRE_FAKE_GPU"); }
  // Real compilers would take minutes.
  void SetUp() override {
    for (const DeviceInfo& info : devices()) {
      if (info.name == "cuda:0" && is_fake(info)) return;
    }
    GTEST_SKIP() << "needs the fake driver and NVRTC";
  }
};

struct NamedShape {
  const char* name;
  ModelShape shape;
};

std::vector<NamedShape> shapes() {
  using enum KvFormat;
  ModelShape llama{.heads = 32, .kv_heads = 8, .head_dim = 128, .context = 8192};
  std::vector<NamedShape> all = {{"llama", llama}};
  ModelShape f16_only = llama;
  f16_only.layers = {{.k = KvFormat::f16, .v = KvFormat::f16}};
  all.push_back({"f16", f16_only});
  ModelShape gemma{.heads = 16, .kv_heads = 8, .head_dim = 256, .context = 8192};
  gemma.layers = kv_layers(2, {.layer = {tq8, tq4, 0, 128, 4}, .window = 1024, .full_every = 2});
  gemma.norm = true;
  gemma.dtype = DType::bf16;
  all.push_back({"window, tail, sink_tokens", gemma});
  ModelShape phi{.heads = 32, .kv_heads = 32, .head_dim = 96, .context = 4096, .step_tokens = 100};
  phi.layers = {{.k = tq3, .v = tq3}};
  phi.page_tokens = 16;
  all.push_back({"96", phi});
  ModelShape uneven{
      .heads = 16, .kv_heads = 4, .head_dim = 192, .v_head_dim = 128, .context = 1000};
  uneven.tree_mask = true;
  all.push_back({"192/128", uneven});
  ModelShape small{.heads = 7, .kv_heads = 1, .head_dim = 64, .context = 20};
  small.out_dtype = DType::f32;
  small.rope = std::nullopt;
  all.push_back({"short", small});
  return all;
}

uint64_t value_dim(const ModelShape& m) { return m.v_head_dim != 0 ? m.v_head_dim : m.head_dim; }

struct Rows {
  Tensor q, k, v, out;
  Rows(const Device& device, const ModelShape& m, uint64_t tokens)
      : q(device.tensor(m.dtype, {tokens, m.heads, m.head_dim})),
        k(device.tensor(m.dtype, {tokens, m.kv_heads, m.head_dim})),
        v(device.tensor(m.dtype, {tokens, m.kv_heads, value_dim(m)})),
        out(device.tensor(m.out_dtype.value_or(m.dtype), {tokens, m.heads, value_dim(m)})) {}
};

void turn(Encoder& encoder, const ModelShape& m, const Rows& rows, const Tensor& positions) {
  if (m.norm) {
    norm_rope(encoder, {.x = rows.q, .positions = positions, .out = rows.q});
  } else if (m.rope) {
    rope(encoder, {.x = rows.q, .positions = positions, .out = rows.q});
  }
}

void run_cache(const Device& device, const ModelShape& m, uint64_t tokens, bool tree_mask) {
  KvCache cache(device, {.kv_heads = m.kv_heads,
                         .head_dim = m.head_dim,
                         .v_head_dim = m.v_head_dim,
                         .capacity = m.context,
                         .layers = m.layers,
                         .step_tokens = m.step_tokens});
  const Rows rows(device, m, tokens);
  Encoder encoder(device);
  cache.begin_step(encoder, tokens);
  turn(encoder, m, rows, cache.positions(tokens));
  const Tensor mask = tree_mask ? device.tensor(DType::u8, {tokens, tokens}) : Tensor();
  for (uint64_t i = 0; i < m.layers.size(); ++i) {
    cache.append(encoder, i, rows.k, rows.v);
    cache.attend(encoder, i, {.q = rows.q, .out = rows.out}, {.mask = {.tree_mask = mask}});
  }
  encoder.submit();
  const KvCache copy = cache.fork(encoder);
  cache.rollback(encoder, 1);
  encoder.submit();
}

void run_batch(const Device& device, const ModelShape& m, uint64_t tokens, bool prompt) {
  const KvPool pool(device, {.kv_heads = m.kv_heads,
                             .head_dim = m.head_dim,
                             .v_head_dim = m.v_head_dim,
                             .layers = m.layers,
                             .pages = m.context / m.page_tokens + 4,
                             .page_tokens = m.page_tokens,
                             .step_tokens = m.step_tokens});
  KvBatch batch(pool, {.max_sequences = 2,
                       .max_tokens = tokens + 1,
                       .max_query_length = tokens,
                       .max_kv_length = m.context});
  KvSequence a = pool.sequence();
  Encoder encoder(device);
  const auto step = [&](std::vector<KvStep> steps) {
    batch.begin_step(encoder, steps);
    encoder.submit();
    const Rows rows(device, m, batch.tokens());
    turn(encoder, m, rows, batch.positions());
    for (uint64_t i = 0; i < m.layers.size(); ++i) {
      batch.append(encoder, i, rows.k, rows.v);
      batch.attend(encoder, i, {.q = rows.q, .out = rows.out});
    }
    encoder.submit();
  };
  step({{a, tokens, prompt}});
  if (a.length() == m.context) return;
  KvSequence b = a.fork();
  step({{a, 1}, {b, 1}});
}

// A step of an engine that has pages of its own.
void run_pages(const Device& device, const ModelShape& m, uint64_t sequences, uint64_t tokens,
               bool prompt) {
  const KvLayer& layer = m.layers[0];
  const KvPageShape shape{.k = layer.k,
                          .v = layer.v,
                          .kv_heads = m.kv_heads,
                          .head_dim = m.head_dim,
                          .v_head_dim = m.v_head_dim,
                          .page_tokens = m.page_tokens};
  const KvPages pages = KvPages::allocate(device, shape, 3);
  const Rows rows(device, m, std::min(sequences * tokens, m.step_tokens));
  Encoder encoder(device);
  kv_write(encoder, {.k = rows.k,
                     .v = rows.v,
                     .pages = pages,
                     .slots = device.tensor(DType::i64, {rows.k.shape(0)})});
  PagedAttentionInputs inputs{.q = rows.q, .pages = pages, .out = rows.out};
  inputs.page_table = device.tensor(DType::i32, {sequences, m.context / m.page_tokens + 1});
  inputs.kv_lengths = device.tensor(DType::i32, {sequences});
  inputs.cu_seqlens_q = device.tensor(DType::i32, {sequences + 1});
  if (prompt) inputs.is_prefill = device.tensor(DType::u8, {sequences});
  const PagedAttentionOptions options{.max_query_length = tokens, .max_kv_length = m.context};
  inputs.schedule = attention_schedule(encoder,
                                       {.pages = pages,
                                        .tokens = rows.q.shape(0),
                                        .heads = m.heads,
                                        .q_dtype = m.dtype,
                                        .kv_lengths = inputs.kv_lengths,
                                        .cu_seqlens_q = inputs.cu_seqlens_q,
                                        .is_prefill = inputs.is_prefill},
                                       options);
  attention(encoder, inputs, options);
  encoder.submit();
}

TEST_F(Prepare, AStepOverAnEnginesPagesCompilesNothingAfterIt) {
  using enum KvFormat;
  for (const auto& [k, v] : {std::pair{tq4, tq4}, {tq8, tq4}, {bf16, bf16}}) {
    fs::remove_all(folder_);
    const Device device = Device::open("cuda:0", options());
    ModelShape shape{.heads = 32, .kv_heads = 8, .head_dim = 128};
    shape.layers = {{.k = k, .v = v}};
    shape.context = 4608, shape.step_tokens = 8192, shape.max_sequences = 64;
    shape.dtype = DType::bf16, shape.rope = std::nullopt;
    shape.use_cache = shape.use_batch = false, shape.use_pages = true;
    const auto made = static_cast<long>(prepare(device, shape).size());
    EXPECT_EQ(compiled(), made);
    for (const uint64_t tokens : {1, 2, 5, 9, 16, 17, 64, 100, 4096, 8192}) {
      for (const uint64_t sequences : {1, 2, 7, 64}) {
        for (const bool prompt : {false, true}) run_pages(device, shape, sequences, tokens, prompt);
      }
    }
    EXPECT_EQ(compiled(), made) << name(k) << "/" << name(v);
  }
}

TEST_F(Prepare, AStepCompilesNothingAfterIt) {
  for (const auto& [name, shape] : shapes()) {
    fs::remove_all(folder_);
    const Device device = Device::open("cuda:0", options());
    uint64_t told = 0;
    const std::vector<PreparedKernel> made =
        prepare(device, shape, [&](const PrepareProgress& now) {
          EXPECT_EQ(now.done, ++told);
          EXPECT_TRUE(now.kernel.compiled) << now.kernel.name;
        });
    EXPECT_EQ(made.size(), told) << name;
    EXPECT_EQ(compiled(), static_cast<long>(told)) << name;
    const uint32_t before = loaded(device);
    EXPECT_GE(before, told) << name;
    const uint64_t largest_step = std::min(shape.step_tokens, shape.context);
    for (const uint64_t tokens : {1, 2, 3, 4, 5, 7, 8, 13, 16, 31, 32, 33, 64, 65, 77, 200, 512}) {
      if (tokens > largest_step) break;
      for (const bool tree_mask : {false, true}) {
        if (!tree_mask || (shape.tree_mask && tokens <= 64))
          run_cache(device, shape, tokens, tree_mask);
      }
      for (const bool prompt : {false, true}) run_batch(device, shape, tokens, prompt);
      ASSERT_EQ(compiled(), static_cast<long>(told)) << name << ", " << tokens << " tokens";
    }
    // Pipelines that differ only in what a kernel reads at run time may be new; kernels are not.
    EXPECT_EQ(loaded(device), before) << name;
  }
}

TEST_F(Prepare, FindsWhatIsThere) {
  const ModelShape shape = shapes()[0].shape;
  const size_t count = prepare(Device::open("cuda:0", options()), shape).size();
  const Device again = Device::open("cuda:0", options());
  for (int i = 0; i < 2; ++i) {  // from the folder, then from the device
    const std::vector<PreparedKernel> made = prepare(again, shape);
    EXPECT_EQ(made.size(), count);
    for (const PreparedKernel& kernel : made) EXPECT_FALSE(kernel.compiled) << kernel.name;
  }
}

TEST_F(Prepare, LeavesOutWhatIsNotUsed) {
  ModelShape shape = shapes()[0].shape;
  const auto names = [&] {
    fs::remove_all(folder_);
    std::string all;
    for (const PreparedKernel& kernel : prepare(Device::open("cuda:0", options()), shape))
      all += kernel.name + "\n";
    return all;
  };
  shape.use_batch = false;
  const std::string cache = names();
  EXPECT_NE(cache.find("kv_append<"), std::string::npos) << cache;
  EXPECT_NE(cache.find("rope_append<"), std::string::npos) << cache;
  EXPECT_EQ(cache.find("kv_write"), std::string::npos) << cache;
  shape.use_batch = true, shape.use_cache = false, shape.rope = std::nullopt;
  const std::string batch = names();
  EXPECT_EQ(batch.find("kv_append<"), std::string::npos) << batch;
  EXPECT_EQ(batch.find("rope<"), std::string::npos) << batch;
  EXPECT_NE(batch.find("kv_write_rows<"), std::string::npos) << batch;
}

// Without the GPU, for its architecture: a device of it then has all it needs.
TEST_F(Prepare, WorksWithoutTheGpu) {
  const Device offline = Device::open("cuda:sm_90", options());
  EXPECT_ERROR(unsupported, ("cuda:sm_90", "only compiles"), offline.tensor(DType::f32, {1}));
  for (const auto& [name, shape] : shapes()) {
    prepare(offline, shape);
    for (const char* multiprocessors : {"132", "114", "78"}) {
      setenv("GYRE_FAKE_GPU", multiprocessors, 1);
      for (const PreparedKernel& kernel : prepare(Device::open("cuda:0", options()), shape))
        EXPECT_FALSE(kernel.compiled) << name << " " << multiprocessors << ": " << kernel.name;
    }
  }
  for (const char* wrong : {"cuda:sm_", "cuda:sm_9", "cuda:sm_90x", "cuda:sm_99999999999"})
    EXPECT_ERROR(invalid_argument, (wrong, "cuda:sm_90"), Device::open(wrong, options()));
}

// It compiles, and says so to whoever wants more of it.
TEST_F(Prepare, ADeviceWithoutAGpuHasNoMemoryAndRunsNothing) {
  const Device offline = Device::open("cuda:sm_90", options());
  float memory = 0;
  EXPECT_ERROR(unsupported, ("device.wrap", "only compiles"),
               offline.wrap(&memory, DType::f32, {1}));
  const CustomKernel kernel({.name = "own",
                             .args = {{"x", Access::read_write}},
                             .params_bytes = 8,
                             .cuda = {"__global__ void own() {}", "own"}});
  EXPECT_TRUE(supports(offline, kernel));
  Encoder encoder(offline);
  EXPECT_ERROR(unsupported, ("encoder", "only compiles"),
               kernel(encoder, uint64_t{0}, {Tensor()}, {}));
  EXPECT_EQ(encoder.size(), 0u);
  EXPECT_ERROR(unsupported, ("encoder.submit", "only compiles"), encoder.submit());
  EXPECT_ERROR(unsupported, ("encoder.instantiate", "only compiles"), encoder.instantiate());
  for (const KernelDescription& row : offline.kernels()) EXPECT_EQ(row.loaded, 0u) << row.name;
  EXPECT_EQ(offline.memory().in_use_bytes, 0u);
  offline.trim();
}

TEST_F(Prepare, TheCAbiTellsOfEachKernel) {
  const std::string folder = options().kernel_cache;
  const gyre_device_options wanted{.size = sizeof(gyre_device_options),
                                   .threads = 0,
                                   .spin_us = 0,
                                   .has_spin_us = 0,
                                   .has_pool_limit = 0,
                                   .pool_limit_bytes = 0,
                                   .kernel_cache = folder.c_str(),
                                   .check_each_launch = 0,
                                   .reserved = 0};
  gyre_device* device = nullptr;
  ASSERT_EQ(gyre_device_open("cuda:0", &wanted, &device), GYRE_OK);
  gyre_model_shape shape{};
  shape.size = sizeof(shape);
  shape.heads = 8, shape.kv_heads = 2, shape.head_dim = 64, shape.context = 256;
  struct Seen {
    uint64_t calls = 0, compiled = 0, last = 0, all = 0;
    std::set<std::string> names{};
  };
  for (const bool again : {false, true}) {
    Seen seen;
    uint64_t kernels = 0;
    const auto note = [](const gyre_prepare_progress* so_far, void* context) {
      auto& to = *static_cast<Seen*>(context);
      ++to.calls;
      to.compiled += so_far->compiled != 0 ? 1 : 0;
      to.last = so_far->done;
      to.all = so_far->all;
      to.names.insert(so_far->kernel);
    };
    ASSERT_EQ(gyre_prepare(device, &shape, note, &seen, &kernels), GYRE_OK);
    EXPECT_GT(kernels, 5u);
    EXPECT_EQ(seen.calls, kernels);
    EXPECT_EQ(seen.last, kernels);
    EXPECT_EQ(seen.all, kernels);
    EXPECT_EQ(seen.names.size(), kernels);
    EXPECT_EQ(seen.compiled, again ? 0 : kernels);
  }
  gyre_device_destroy(device);
}

void expect_refusals(const Device& device) {
  const ModelShape good{.heads = 8, .kv_heads = 2, .head_dim = 64, .context = 256};
  const auto refuses = [&](std::vector<std::string> words, auto change) {
    ModelShape shape = good;
    change(shape);
    EXPECT_TRUE(throws_error(ErrorCode::invalid_argument, words, [&] { prepare(device, shape); }))
        << words[0];
  };
  refuses({"prepare", "heads"}, [](ModelShape& m) { m.heads = 0; });
  refuses({"prepare", "kv_heads"}, [](ModelShape& m) { m.kv_heads = 3; });
  refuses({"prepare", "context"}, [](ModelShape& m) { m.context = 0; });
  refuses({"prepare", "step_tokens"}, [](ModelShape& m) { m.step_tokens = 0; });
  refuses({"prepare", "use_cache"}, [](ModelShape& m) { m.use_cache = m.use_batch = false; });
  refuses({"prepare", "no tail", "128"}, [](ModelShape& m) { m.use_pages = true; });
  refuses({"head_dim", "13"}, [](ModelShape& m) { m.head_dim = 13; });
  refuses({"layers"}, [](ModelShape& m) { m.layers.clear(); });
  refuses({"page_tokens"}, [](ModelShape& m) { m.page_tokens = 0; });
  refuses({"page_tokens", "9"}, [](ModelShape& m) { m.page_tokens = 9; });
  refuses({"sequences"}, [](ModelShape& m) { m.max_sequences = 0; });
  refuses({"u8"}, [](ModelShape& m) { m.dtype = DType::u8; });
  refuses({"rotary_dim", "65"}, [](ModelShape& m) { m.rope->rotary_dim = 65; });
}

TEST_F(Prepare, RefusesWhatTheModelsCallsRefuse) {
  const Device device = Device::open("cuda:0", options());
  expect_refusals(device);
  EXPECT_EQ(compiled(), 0);
}

TEST(PrepareOnCpu, HasNothingToBuildAndRefusesTheSame) {
  const Device device = Device::open("cpu");
  for (const auto& [name, shape] : shapes())
    EXPECT_TRUE(prepare(device, shape, [](const PrepareProgress&) { FAIL(); }).empty()) << name;
  EXPECT_EQ(device.memory().in_use_bytes, 0u);
  expect_refusals(device);
}

}  // namespace
}  // namespace gyre::test
