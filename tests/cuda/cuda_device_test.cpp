// The CUDA backend on a GPU; skipped where there is none.
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <iostream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "cuda/context.h"
#include "expect_error.h"
#include "gyre/gyre.h"
#include "runtime/kernels.h"
#include "runtime/recorder.h"
#include "tensor_bytes.h"

namespace gyre::test {
namespace {

bool has_gpu() {
  for (const DeviceInfo& info : devices()) {
    if (info.name == "cuda:0") return info.available;
  }
  return false;
}

void copy_bytes(Encoder& encoder, const Tensor& from, const Tensor& to, uint64_t bytes) {
  Recording recording(encoder, "copy");
  recording.dispatch(kBytesCopy, abi::BytesCopySpec{}, abi::BytesCopyParams{bytes, 1, 0, 0},
                     {&from, &to});
  recording.commit();
}

class CudaDevice : public testing::Test {
 protected:
  void SetUp() override {
    if (!has_gpu()) GTEST_SKIP() << "no CUDA device here";
    device_ = Device::open("cuda");
  }
  const Device& device() const { return device_; }
  Tensor filled(uint64_t bytes, uint32_t seed) const {
    const Tensor tensor = device_.tensor(DType::u8, {bytes});
    write_bytes(tensor, pattern_bytes(bytes, seed));
    return tensor;
  }

 private:
  Device device_{nullptr};
};

TEST_F(CudaDevice, DescribesItself) {
  const DeviceInfo& info = device().info();
  EXPECT_EQ(info.name, "cuda:0");
  EXPECT_NE(info.description.find("compute capability"), std::string::npos) << info.description;
  EXPECT_GT(info.compute_units, 0u);
  EXPECT_GT(info.memory_bytes, uint64_t{1} << 30);
  EXPECT_TRUE(throws_error(ErrorCode::unsupported, {"cuda:99", "there are"},
                           [] { Device::open("cuda:99"); }));
}

TEST_F(CudaDevice, HostCopiesOfEverySize) {
  // Around the halves of the staging memory, and odd.
  for (const uint64_t bytes : {1u, 255u, 4u << 20, (4u << 20) + 1, (8u << 20) - 3, 33333333u}) {
    const Tensor tensor = device().tensor(DType::u8, {bytes});
    EXPECT_EQ(read_bytes(tensor), Bytes(bytes)) << "zero-filled, " << bytes;
    write_bytes(tensor, pattern_bytes(bytes, 3));
    EXPECT_EQ(read_bytes(tensor), pattern_bytes(bytes, 3)) << bytes;
  }
}

TEST_F(CudaDevice, StridedHostCopiesLeaveTheGapsAlone) {
  const Tensor all = filled(6000, 1).reshape({10, 20, 30});
  const Tensor view = all.slice(1, 3, 4).permute({1, 0, 2});
  Bytes expected = read_bytes(all);
  const Bytes fresh = pattern_bytes(view.bytes(), 9);
  write_bytes(view, fresh);
  for (uint64_t i = 0; i < fresh.size(); ++i)
    expected[i / 30 % 10 * 600 + (3 + i / 300) * 30 + i % 30] = fresh[i];
  EXPECT_EQ(read_bytes(all), expected);
  EXPECT_EQ(read_bytes(view), fresh);
}

TEST_F(CudaDevice, ReusedMemoryIsZeroAndWaitsForItsLastUser) {
  const Tensor from = filled(64 << 20, 5), to = device().tensor(DType::u8, {64 << 20});
  Encoder encoder(device());
  uint64_t address = 0;
  {
    const Tensor scratch = device().tensor(DType::u8, {64 << 20});
    address = scratch.storage()->address();
    copy_bytes(encoder, from, scratch, from.bytes());
    copy_bytes(encoder, scratch, to, from.bytes());
  }
  const Fence fence = encoder.submit();  // the list was the last to hold the scratch memory
  const Tensor next = device().tensor(DType::u8, {64 << 20});
  EXPECT_EQ(next.storage()->address(), address) << "nothing was reused: the test shows nothing";
  EXPECT_EQ(read_bytes(next), Bytes(64 << 20));
  fence.wait();
  EXPECT_TRUE(fence.done());
  EXPECT_EQ(read_bytes(to), pattern_bytes(64 << 20, 5));
}

TEST_F(CudaDevice, AGraphFollowsItsLevels) {
  // Each copy waits for those before; the ones of a level lie side by side, one or two in turn.
  constexpr uint64_t kBytes = 1 << 20;
  constexpr uint64_t kWidths[] = {1, 1, 1, 2, 2, 1, 2, 1, 1};
  std::vector<std::vector<Tensor>> levels = {{filled(kBytes, 0)}};
  Encoder encoder(device());
  for (const uint64_t width : kWidths) {
    std::vector<Tensor> next;
    for (uint64_t i = 0; i < width; ++i) {
      next.push_back(device().tensor(DType::u8, {kBytes}));
      copy_bytes(encoder, levels.back()[i % levels.back().size()], next.back(), kBytes);
    }
    levels.push_back(std::move(next));
  }
  EXPECT_EQ(encoder.barriers(), std::size(kWidths) - 1);
  const Graph graph = encoder.instantiate();
  for (uint32_t round = 0; round < 3; ++round) {
    const auto bytes = pattern_bytes(kBytes, 10 + round);
    write_bytes(levels[0][0], bytes);
    if (round > 0) graph.replay();
    graph.replay().wait();
    for (const auto& level : levels) {
      for (const Tensor& tensor : level) EXPECT_EQ(read_bytes(tensor), bytes);
    }
    for (size_t i = 1; i < levels.size(); ++i) {  // what is left would hide a copy too late
      for (const Tensor& tensor : levels[i]) write_bytes(tensor, pattern_bytes(kBytes, 99));
    }
  }
}

TEST_F(CudaDevice, AGraphMayGoWhileItRuns) {
  const Tensor from = filled(32 << 20, 1), to = device().tensor(DType::u8, {32 << 20});
  Fence fence;
  {
    Encoder encoder(device());
    copy_bytes(encoder, from, to, from.bytes());
    const Graph graph = encoder.instantiate();
    for (int i = 0; i < 20; ++i) fence = graph.replay();
  }
  fence.wait();
  EXPECT_EQ(read_bytes(to), pattern_bytes(32 << 20, 1));
}

TEST_F(CudaDevice, WrapsItsOwnMemoryOnly) {
  std::vector<float> host(8);
  EXPECT_TRUE(throws_error(ErrorCode::unsupported, {"device.wrap", "cuda:0", "write_from"},
                           [&] { device().wrap(host.data(), DType::f32, {8}); }));
  const Tensor memory = filled(1024, 4);
  auto owner = std::make_shared<int>(1);
  const std::weak_ptr<int> alive = owner;
  Fence fence;
  const Tensor to = device().tensor(DType::u8, {1000});
  {
    auto* const address = static_cast<uint8_t*>(address_of(memory));
    const Tensor wrapped = device().wrap(address + 8, DType::u8, {1000}, {}, std::move(owner));
    Encoder encoder(device());
    copy_bytes(encoder, wrapped, to, 1000);
    fence = encoder.submit();
  }
  fence.wait();
  EXPECT_TRUE(alive.expired());
  const Bytes all = pattern_bytes(1024, 4);
  EXPECT_EQ(read_bytes(to), Bytes(all.begin() + 8, all.begin() + 1008));
}

TEST_F(CudaDevice, WaitsForAllThatWasSubmitted) {
  EXPECT_NE(device().stream(), 0u);
  const Tensor from = filled(1 << 20, 5), to = device().tensor(DType::u8, {1 << 20});
  Encoder encoder(device());
  Fence last;
  for (int i = 0; i < 20; ++i) {
    copy_bytes(encoder, from, to, 1 << 20);
    last = encoder.submit();
  }
  device().wait();
  EXPECT_TRUE(last.done());
}

// A stream of somebody else's, as an engine has.
class ForeignStream {
 public:
  ForeignStream() : context_(0), current_(context_) {
    check(api().stream_create(&stream_, cuda::kCuStreamNonBlocking));
  }
  ForeignStream(const ForeignStream&) = delete;
  ForeignStream& operator=(const ForeignStream&) = delete;
  ~ForeignStream() { api().stream_destroy(stream_); }

  static const cuda::Driver& api() { return cuda::driver(); }
  static void check(cuda::CuResult result) { ASSERT_EQ(result, cuda::kCuSuccess); }
  uint64_t handle() const { return reinterpret_cast<uintptr_t>(stream_); }
  void wait() const { check(api().stream_synchronize(stream_)); }

  void begin_capture() const {
    constexpr int kGlobal = 0;  // the strictest mode
    check(
        find<cuda::CuResult (*)(cuda::CuStream, int)>("cuStreamBeginCapture_v2")(stream_, kGlobal));
  }
  cuda::CuGraph end_capture() const {
    cuda::CuGraph graph = nullptr;
    check(find<cuda::CuResult (*)(cuda::CuStream, cuda::CuGraph*)>("cuStreamEndCapture")(stream_,
                                                                                         &graph));
    return graph;
  }
  void launch(cuda::CuGraphExec exec) const { check(api().graph_launch(exec, stream_)); }

 private:
  template <class Function>
  static Function find(const char* name) {
    void* const library = dlopen("libcuda.so.1", RTLD_NOW);
    return reinterpret_cast<Function>(dlsym(library, name));
  }
  cuda::Context context_;  // the GPU's primary one, current while the stream lives
  cuda::Current current_;
  cuda::CuStream stream_ = nullptr;
};

TEST_F(CudaDevice, SubmitsOntoAStreamOfTheCallers) {
  const ForeignStream foreign;
  constexpr uint64_t kBytes = 1 << 20;
  const Tensor a = filled(kBytes, 5), b = device().tensor(DType::u8, {kBytes}),
               c = device().tensor(DType::u8, {kBytes}), d = device().tensor(DType::u8, {kBytes});
  Encoder encoder(device());
  // Own stream, the caller's, own stream again: each follows the one before.
  for (int i = 0; i < 20; ++i) {
    copy_bytes(encoder, a, b, kBytes);
    encoder.submit();
    copy_bytes(encoder, b, c, kBytes);
    const Fence fence = encoder.submit_on(foreign.handle());
    copy_bytes(encoder, c, d, kBytes);
    encoder.submit();
    fence.wait();
    EXPECT_TRUE(fence.done());
  }
  device().wait();
  EXPECT_EQ(read_bytes(d), pattern_bytes(kBytes, 5));
}

TEST_F(CudaDevice, IsCapturedByAGraphOfTheCallers) {
  const ForeignStream foreign;
  constexpr uint64_t kBytes = 1 << 20;
  const Tensor a = filled(kBytes, 1), b = device().tensor(DType::u8, {kBytes});
  Encoder encoder(device());
  std::weak_ptr<Storage> scratch;
  Fence fence;
  {
    const Tensor between = device().tensor(DType::u8, {kBytes});
    scratch = between.storage();
    copy_bytes(encoder, a, between, kBytes);
    copy_bytes(encoder, between, b, kBytes);
    device().wait();
    foreign.begin_capture();
    fence = encoder.submit_on(foreign.handle());
  }
  cuda::CuGraph graph = foreign.end_capture();
  ASSERT_NE(graph, nullptr);
  EXPECT_EQ(read_bytes(b), Bytes(kBytes)) << "nothing has run yet";
  EXPECT_FALSE(scratch.expired()) << "the fence holds what the graph uses";
  cuda::CuGraphExec exec = nullptr;
  ForeignStream::check(ForeignStream::api().graph_instantiate(&exec, graph, 0));
  for (const uint32_t seed : {7u, 8u}) {
    write_bytes(a, pattern_bytes(kBytes, seed));
    foreign.launch(exec);
    foreign.wait();
    EXPECT_EQ(read_bytes(b), pattern_bytes(kBytes, seed));
  }
  ForeignStream::api().graph_exec_destroy(exec);
  ForeignStream::api().graph_destroy(graph);
  fence = {};
  EXPECT_TRUE(scratch.expired());
}

TEST_F(CudaDevice, TracesCommandsOfSubmitsAndReplays) {
  const Tensor from = filled(1 << 20, 1), to = device().tensor(DType::u8, {1 << 20});
  Encoder encoder(device());
  copy_bytes(encoder, from, to, 1 << 20);
  const Graph graph = encoder.instantiate();
  copy_bytes(encoder, from, to, 1 << 20);
  device().start_trace();
  encoder.submit().wait();
  graph.replay().wait();
  const Trace trace = device().stop_trace();
  ASSERT_EQ(trace.events.size(), 2u);
  for (const TraceEvent& event : trace.events) {
    EXPECT_EQ(event.kernel, "bytes_copy");
    EXPECT_GT(event.duration_ns(), 0u);
  }
  EXPECT_GE(trace.events[1].begin_ns(), trace.events[0].begin_ns());
}

TEST_F(CudaDevice, ServesSeveralThreads) {
  std::vector<std::thread> threads;
  for (uint32_t seed = 1; seed <= 4; ++seed) {
    threads.emplace_back([this, seed] {
      for (uint32_t round = 0; round < 50; ++round) {
        const uint64_t bytes = 1000 + 100 * round;
        const Tensor from = filled(bytes, seed), to = device().tensor(DType::u8, {bytes});
        Encoder encoder(device());
        copy_bytes(encoder, from, to, bytes);
        if (round % 2 == 0) {
          encoder.submit();
        } else {
          encoder.instantiate().replay();
        }
        EXPECT_EQ(read_bytes(to), pattern_bytes(bytes, seed)) << "a read waits for the work";
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST_F(CudaDevice, FencesAndTensorsOutliveTheDevice) {
  Fence fence;
  Tensor to;
  {
    const Device own = Device::open("cuda:0", {.kernel_cache = "off"});
    const Tensor from = own.tensor(DType::u8, {1 << 20});
    to = own.tensor(DType::u8, {1 << 20});
    Encoder encoder(own);
    copy_bytes(encoder, from, to, 1 << 20);
    fence = encoder.submit();
  }
  fence.wait();
  EXPECT_EQ(read_bytes(to), Bytes(1 << 20));
}

// Last: the process's GPU context does not survive it while anybody holds a device.
// Returns what is wrong. The process has lost its device afterwards.
std::string provoke_error(bool each) {
  const Device device = Device::open("cuda:0", {.check_each_launch = each});
  const Tensor from = device.tensor(DType::u8, {256}), to = device.tensor(DType::u8, {256});
  Encoder encoder(device);
  copy_bytes(encoder, from, to, 256);
  copy_bytes(encoder, from, to, uint64_t{1} << 44);  // far beyond any memory
  std::vector<std::string> parts = {"cuda:0", "bytes_copy (bytes=17592186044416)"};
  parts.emplace_back(each ? "in bytes_copy" : "one of 2 commands");
  Fence fence;
  std::string wrong;
  const auto expect = [&](const testing::AssertionResult& result) {
    if (!result) wrong += std::string(result.message()) + "; ";
  };
  expect(throws_error(ErrorCode::device_lost, parts, [&] {
    fence = encoder.submit();
    fence.wait();
  }));
  if (!each) expect(throws_error(ErrorCode::device_lost, parts, [&] { fence.wait(); }));
  expect(throws_error(ErrorCode::device_lost, {}, [&] { read_bytes(to); }));
  expect(throws_error(ErrorCode::device_lost, {}, [&] { device.tensor(DType::u8, {64}); }));
  return wrong;
}

// In processes of their own: what a kernel broke stays broken for its process.
class CudaErrors : public testing::TestWithParam<bool> {};

TEST_P(CudaErrors, AreKeptAndNameTheCommand) {
  if (!has_gpu()) GTEST_SKIP() << "no CUDA device here";
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        const std::string wrong = provoke_error(GetParam());
        std::cerr << wrong;
        std::exit(wrong.empty() ? 0 : 1);
      },
      testing::ExitedWithCode(0), "");
}

INSTANTIATE_TEST_SUITE_P(All, CudaErrors, testing::Bool(), [](const auto& each) {
  return each.param ? "CheckedEach" : "CheckedAtTheEnd";
});

}  // namespace
}  // namespace gyre::test
