// libggml-gyre.so as ggml loads it, in a program that stands in for ggml: what it accepts, what it
// computes, what it leaves.
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <limits>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

#include "ggml/fake_ggml.h"

namespace gyre::ggml::test {
namespace {

constexpr double kBound = 1e-9;

void set(const char* name, const char* value) {
  value == nullptr ? unsetenv(name) : setenv(name, value, 1);
}

// A copy of the library, so that each test has one that was never loaded before.
class Library {
 public:
  Library() {
    static int copies = 0;
    const auto path = std::filesystem::path(testing::TempDir()) /
                      ("libggml-gyre." + std::to_string(getpid()) + "." + std::to_string(copies++));
    std::filesystem::copy_file(GYRE_GGML_LIBRARY, path);
    handle_ = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    std::filesystem::remove(path);
    if (handle_ == nullptr) throw std::runtime_error(dlerror());
  }

  // Loads the library under GYRE_GGML=way; `said` is what it wrote.
  abi::Registry* load(const char* way = nullptr) {
    set("GYRE_GGML", way);
    const auto init = reinterpret_cast<abi::Registry* (*)()>(dlsym(handle_, "ggml_backend_init"));
    testing::internal::CaptureStderr();
    abi::Registry* const registry = init();
    said = testing::internal::GetCapturedStderr();
    set("GYRE_GGML", nullptr);
    return registry;
  }

  std::string said;

 private:
  void* handle_ = nullptr;
};

abi::Device* device_of(abi::Registry* registry) { return registry->table.get_device(registry, 0); }
void tell_threads(abi::Registry* registry, abi::Backend* backend, int threads) {
  void* const function = registry->table.get_proc_address(registry, "ggml_backend_set_n_threads");
  reinterpret_cast<void (*)(abi::Backend*, int)>(function)(backend, threads);
}
bool supports(abi::Registry* registry, const Node& node) {
  abi::Device* const device = device_of(registry);
  return device->table.supports_op(device, &node.out);
}
abi::Backend* make(abi::Device* device) { return device->table.init_backend(device, nullptr); }
abi::Status compute(abi::Backend* backend, Node& node) {
  return backend->table.graph_compute(backend, &node.graph);
}
void release(abi::Backend* backend) { backend->table.free(backend); }

class GgmlBackend : public testing::Test {
 protected:
  void SetUp() override { reset_fake(); }
  void TearDown() override { EXPECT_EQ(fake().backends, 0) << "backends that were not freed"; }
};

Shape decode_shape() {
  Shape shape{.tokens = 1, .cells = 1300, .heads = 6, .kv_heads = 2};
  shape.k = RowType::q8_0, shape.v = RowType::q4_0;
  shape.mask = [](uint64_t, uint64_t, uint64_t cell) {
    return cell < 1200 ? 0.0f : -std::numeric_limits<float>::infinity();
  };
  return shape;
}

// What the library says when it stands aside.
std::string reason(const char* way = nullptr) {
  Library library;
  EXPECT_EQ(library.load(way), nullptr);
  EXPECT_NE(library.said.find("standing aside: "), std::string::npos) << library.said;
  return library.said;
}

TEST_F(GgmlBackend, StandsAsideWhereGgmlIsNotTheOneItKnows) {
  const auto expect = [](const char* what, auto change) {
    reset_fake();
    change(fake());
    EXPECT_NE(reason().find(what), std::string::npos) << what;
  };
  expect("ggml 0.26.0 is not known", [](FakeGgml& ggml) { ggml.version = "0.26.0"; });
  expect("ggml 0.250.1 is not known", [](FakeGgml& ggml) { ggml.version = "0.250.1"; });
  expect("another size", [](FakeGgml& ggml) { ggml.tensor_overhead += 8; });
  expect("type q4_0", [](FakeGgml& ggml) { ggml.q4_0_bytes = 20; });
  expect("CUSTOM", [](FakeGgml& ggml) { ggml.custom_name = "MAP_CUSTOM"; });
  expect("no CPU device", [](FakeGgml& ggml) { ggml.has_cpu = false; });
  expect("device's table", [](FakeGgml& ggml) { ggml.registry.api_version = 3; });
  expect("device's table", [](FakeGgml& ggml) { ggml.cpu.table.init_backend = nullptr; });
}

// The backend of a table that is not known cannot be freed: where `free` is, is not known either.
TEST_F(GgmlBackend, StandsAsideWhereEntriesOfTheBackendMoved) {
  fake().moved_tables = true;
  EXPECT_NE(reason().find("backend's table"), std::string::npos);
  ASSERT_EQ(fake().backends, 1);
  release(fake().moved);
}

TEST_F(GgmlBackend, EnvironmentVariables) {
  EXPECT_NE(reason("off").find("GYRE_GGML=off"), std::string::npos);
  EXPECT_NE(reason("hook").find("none of accel, wrap, off"), std::string::npos);
  fake().version = "0.26.0";
  set("GYRE_GGML_VERSION", "0.26.1");
  EXPECT_NE(reason().find("not known"), std::string::npos);
  set("GYRE_GGML_VERSION", "0.26.0");
  EXPECT_NE(Library().load(), nullptr);
  set("GYRE_GGML_VERSION", nullptr);
}

TEST_F(GgmlBackend, AcceleratorComputesAndRestoresNodes) {
  Library library;
  abi::Registry* const registry = library.load();
  ASSERT_NE(registry, nullptr) << library.said;
  EXPECT_NE(library.said.find("active, accelerator device"), std::string::npos);
  abi::Backend* const backend = make(device_of(registry));
  Shape shape = decode_shape();
  for (const uint64_t tokens : {1, 40}) {
    shape.tokens = tokens;
    Node node(shape);
    const abi::Tensor before = node.out;
    for (const int threads : {1, 2, 3}) {
      tell_threads(registry, backend, threads);
      ASSERT_TRUE(supports(registry, node));
      EXPECT_EQ(compute(backend, node), abi::status_success);
      EXPECT_EQ(std::memcmp(&before, &node.out, sizeof(before)), 0);
      EXPECT_LE(node.error(), kBound) << tokens << " tokens, " << threads << " threads";
    }
  }
  EXPECT_EQ(fake().left, 0);
  release(backend);
}

TEST_F(GgmlBackend, NodesAreRestoredAfterAFailure) {
  Library library;
  abi::Registry* const registry = library.load();
  abi::Backend* const backend = make(device_of(registry));
  Node node(decode_shape());
  fake().fails = true;
  EXPECT_EQ(compute(backend, node), abi::status_failed);
  EXPECT_EQ(node.out.op, kOpAttention);
  EXPECT_EQ(node.out.op_params[3], 10);
  release(backend);
}

TEST_F(GgmlBackend, NodesThatItDoesNotTakeStayWithGgml) {
  Library library;
  abi::Registry* const registry = library.load();
  abi::Backend* const backend = make(device_of(registry));
  tell_threads(registry, backend, 2);
  abi::Buffer device_memory{false};
  const auto refused = [&](auto change) {
    Shape shape = decode_shape();
    shape.sinks = true;
    Node node(shape);
    change(node);
    const int left = fake().left;
    EXPECT_EQ(compute(backend, node), abi::status_success);
    return !supports(registry, node) && fake().left == left + 1;
  };
  EXPECT_FALSE(refused([](Node&) {}));
  EXPECT_TRUE(refused([](Node& node) { node.k.type = kTypeIq4Nl; }));
  EXPECT_TRUE(refused([](Node& node) { node.q.type = 1; }));
  EXPECT_TRUE(refused([](Node& node) { node.mask.type = 0; }));
  EXPECT_TRUE(refused([](Node& node) { node.mask.ne[0] = 5; }));
  EXPECT_TRUE(refused([](Node& node) { node.sinks.ne[0] = 5; }));
  EXPECT_TRUE(refused([](Node& node) { node.out.op_params[5] = 1; }));
  EXPECT_TRUE(refused([](Node& node) { node.out.src[5] = &node.q; }));
  EXPECT_TRUE(refused([](Node& node) { node.out.src[2] = nullptr; }));
  EXPECT_TRUE(refused([](Node& node) { node.v.ne[2] = 1; }));
  EXPECT_TRUE(refused([](Node& node) { node.v.ne[1] -= 1; }));
  EXPECT_TRUE(refused([](Node& node) { node.k.nb[0] += 2; }));
  EXPECT_TRUE(refused([](Node& node) { node.k.ne[0] = node.q.ne[0] = 72; }));
  EXPECT_TRUE(refused([](Node& node) { node.out.ne[2] = 7; }));
  EXPECT_TRUE(refused([&](Node& node) { node.k.buffer = &device_memory; }));
  EXPECT_TRUE(refused([&](Node& node) { node.mask.buffer = &device_memory; }));
  release(backend);
}

// llama.cpp asks before memory is there; a graph without it is not computed.
TEST_F(GgmlBackend, TensorsWithoutMemoryAreClaimedAndNotComputed) {
  Library library;
  abi::Registry* const registry = library.load();
  abi::Backend* const backend = make(device_of(registry));
  tell_threads(registry, backend, 2);
  Shape shape = decode_shape();
  shape.sinks = true;
  Node node(shape);
  for (abi::Tensor* const tensor :
       {&node.q, &node.k, &node.v, &node.mask, &node.sinks, &node.out}) {
    void* const data = std::exchange(tensor->data, nullptr);
    EXPECT_TRUE(supports(registry, node));
    const int left = fake().left;
    EXPECT_EQ(compute(backend, node), abi::status_success);
    EXPECT_EQ(fake().left, left + 1);
    tensor->data = data;
  }
  release(backend);
}

// With `-fa auto` llama.cpp asks, while it makes a context, whether attention runs on the CPU: with
// the first graph. The next has another number of tokens, and what it is asked about is computed
// here. A context that was made and does not compute must not keep others from using the device.
TEST_F(GgmlBackend, SupportsNothingInTheFirstGraphOfAContext) {
  Library library;
  abi::Registry* const registry = library.load();
  Node node(decode_shape());
  Shape prompt_shape = decode_shape();
  prompt_shape.tokens = 40;
  Node prompt(prompt_shape);
  abi::Backend* const first = make(device_of(registry));
  EXPECT_FALSE(supports(registry, node));
  tell_threads(registry, first, 2);
  EXPECT_TRUE(supports(registry, node));
  abi::Backend* const second = make(device_of(registry));  // never computes
  EXPECT_FALSE(supports(registry, node));
  EXPECT_FALSE(supports(registry, node));
  std::thread([&] { EXPECT_TRUE(supports(registry, node)); }).join();
  EXPECT_TRUE(supports(registry, prompt));
  EXPECT_TRUE(supports(registry, node));
  abi::Backend* const third = make(device_of(registry));
  release(third);  // a context that could not be made
  EXPECT_TRUE(supports(registry, node));
  release(second);
  release(first);
}

TEST_F(GgmlBackend, WrappedCpuComputesAndTheReferenceDoesNot) {
  abi::Backend* const older = make(&fake().cpu);
  Library library;
  abi::Registry* const registry = library.load("wrap");
  ASSERT_NE(registry, nullptr) << library.said;
  EXPECT_EQ(registry->table.get_device_count(registry), 0u);
  Node node(decode_shape());
  EXPECT_EQ(compute(older, node), abi::status_success);
  EXPECT_EQ(fake().left, 1) << "made before the library was loaded";
  abi::Backend* const backend = make(&fake().cpu);
  EXPECT_EQ(compute(backend, node), abi::status_success);
  EXPECT_LE(node.error(), kBound);
  EXPECT_EQ(fake().left, 1);
  void* const function =
      fake().registry.table.get_proc_address(&fake().registry, "ggml_backend_cpu_set_use_ref");
  reinterpret_cast<void (*)(abi::Backend*, bool)>(function)(backend, true);
  EXPECT_EQ(fake().reference_calls, 1);
  EXPECT_EQ(compute(backend, node), abi::status_success);
  EXPECT_EQ(fake().left, 2) << "a test suite's reference runs ggml's kernel";
  release(backend);
  release(older);
}

TEST_F(GgmlBackend, TwoContextsAtOnce) {
  for (const char* const way : {"accel", "wrap"}) {
    reset_fake();
    Library library;
    abi::Registry* const registry = library.load(way);
    ASSERT_NE(registry, nullptr) << library.said;
    const bool wraps = registry->table.get_device_count(registry) == 0;
    const auto work = [&](uint64_t tokens) {
      abi::Backend* const backend = make(wraps ? &fake().cpu : device_of(registry));
      Shape shape = decode_shape();
      shape.tokens = tokens, shape.seed = static_cast<uint32_t>(tokens);
      Node node(shape);
      for (int i = 0; i < 20; ++i) EXPECT_EQ(compute(backend, node), abi::status_success);
      EXPECT_LE(node.error(), kBound) << way;
      release(backend);
    };
    std::thread other(work, 1);
    work(9);
    other.join();
    EXPECT_EQ(fake().left, 0) << way;
  }
}

// ggml keeps one entry per registry: a second load of the same ggml returns the one there is.
TEST_F(GgmlBackend, LoadsAgainAndStandsAsideForAnotherGgml) {
  Library library;
  abi::Registry* const registry = library.load();
  ASSERT_NE(registry, nullptr);
  EXPECT_EQ(library.load(), registry);
  EXPECT_NE(library.said.find("active, accelerator device"), std::string::npos) << library.said;
  EXPECT_EQ(library.load("wrap"), nullptr);
  EXPECT_NE(library.said.find("already loaded with GYRE_GGML=accel"), std::string::npos);
  fake().is_second = true;
  EXPECT_EQ(library.load(), nullptr);
  EXPECT_NE(library.said.find("another ggml"), std::string::npos) << library.said;
}

}  // namespace
}  // namespace gyre::ggml::test
