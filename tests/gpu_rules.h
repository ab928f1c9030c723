#pragma once
// What holds on every GPU, for the tests of a backend's host side.

#include "gyre_test.h"
#include "in_threads.h"
#include "tensor_bytes.h"

namespace gyre::test {

// Records a copy of all bytes.
using RecordCopy = std::function<void(Encoder& encoder, const Tensor& from, const Tensor& to)>;

inline Tensor filled(const Device& device, uint64_t bytes, uint32_t seed) {
  const Tensor tensor = device.tensor(DType::u8, {bytes});
  write_bytes(tensor, pattern_bytes(bytes, seed));
  return tensor;
}

inline void expect_host_copies(const Device& device, std::span<const uint64_t> sizes) {
  for (const uint64_t bytes : sizes) {
    const Tensor tensor = device.tensor(DType::u8, {bytes});
    EXPECT_EQ(read_bytes(tensor), Bytes(bytes)) << "zero-filled, " << bytes;
    write_bytes(tensor, pattern_bytes(bytes, 3));
    EXPECT_EQ(read_bytes(tensor), pattern_bytes(bytes, 3)) << bytes;
  }
}

inline void expect_strided_host_copies(const Device& device) {
  const Tensor all = filled(device, 6000, 1).reshape({10, 20, 30});
  const Tensor view = all.slice(1, 3, 4).permute({1, 0, 2});
  Bytes expected = read_bytes(all);
  const Bytes fresh = pattern_bytes(view.bytes(), 9);
  write_bytes(view, fresh);
  for (uint64_t i = 0; i < fresh.size(); ++i)
    expected[i / 30 % 10 * 600 + (3 + i / 300) * 30 + i % 30] = fresh[i];
  EXPECT_EQ(read_bytes(all), expected);
  EXPECT_EQ(read_bytes(view), fresh);
}

// Each copy waits for those before; the ones of a level lie side by side, one or two in turn.
inline void expect_levels_of_a_graph(const Device& device, uint64_t bytes, const RecordCopy& copy) {
  constexpr uint64_t kWidths[] = {1, 1, 1, 2, 2, 1, 2, 1, 1};
  std::vector<std::vector<Tensor>> levels = {{filled(device, bytes, 0)}};
  Encoder encoder(device);
  for (const uint64_t width : kWidths) {
    std::vector<Tensor> next;
    for (uint64_t i = 0; i < width; ++i) {
      next.push_back(device.tensor(DType::u8, {bytes}));
      copy(encoder, levels.back()[i % levels.back().size()], next.back());
    }
    levels.push_back(std::move(next));
  }
  EXPECT_EQ(encoder.barriers(), std::size(kWidths) - 1);
  const Graph graph = encoder.instantiate();
  EXPECT_EQ(graph.size(), 12u);
  for (uint32_t round = 0; round < 3; ++round) {
    const Bytes fresh = pattern_bytes(bytes, 10 + round);
    write_bytes(levels[0][0], fresh);
    if (round > 0) graph.replay();
    graph.replay().wait();
    for (const auto& level : levels) {
      for (const Tensor& tensor : level) EXPECT_EQ(read_bytes(tensor), fresh);
    }
    for (size_t i = 1; i < levels.size(); ++i) {  // what is left would hide a copy too late
      for (const Tensor& tensor : levels[i]) write_bytes(tensor, pattern_bytes(bytes, 99));
    }
  }
}

inline void expect_a_graph_may_go(const Device& device, uint64_t bytes, const RecordCopy& copy) {
  const Tensor from = filled(device, bytes, 1), to = device.tensor(DType::u8, {bytes});
  Fence fence;
  {
    Encoder encoder(device);
    copy(encoder, from, to);
    const Graph graph = encoder.instantiate();
    for (int i = 0; i < 20; ++i) fence = graph.replay();
  }
  fence.wait();
  EXPECT_EQ(read_bytes(to), pattern_bytes(bytes, 1));
}

inline void expect_wait_for_all(const Device& device, uint64_t bytes, const RecordCopy& copy) {
  const Tensor from = filled(device, bytes, 5), to = device.tensor(DType::u8, {bytes});
  Encoder encoder(device);
  Fence last;
  for (int i = 0; i < 20; ++i) {
    copy(encoder, from, to);
    last = encoder.submit();
  }
  device.wait();
  EXPECT_TRUE(last.done());
  last.wait();
}

// One copy submitted, then two that a graph replays.
inline Trace expect_traced_copies(const Device& device, const std::string& kernel,
                                  const RecordCopy& copy) {
  constexpr uint64_t kBytes = 1 << 20;
  const Tensor from = filled(device, kBytes, 1), to = device.tensor(DType::u8, {kBytes}),
               other = device.tensor(DType::u8, {kBytes});
  Encoder encoder(device);
  copy(encoder, from, to);
  copy(encoder, to, other);
  const Graph graph = encoder.instantiate();
  copy(encoder, from, to);
  device.start_trace();
  encoder.submit().wait();
  graph.replay().wait();
  Trace trace = device.stop_trace();
  EXPECT_EQ(trace.events.size(), 3u);
  uint64_t before = 0, all = 0;  // a clock may be too coarse for one of them
  for (const TraceEvent& event : trace.events) {
    EXPECT_EQ(event.kernel, kernel);
    all += event.duration_ns();
    EXPECT_GE(event.begin_ns(), std::exchange(before, event.begin_ns()));
  }
  EXPECT_GT(all, 0u);
  EXPECT_TRUE(trace.events.back().barrier);
  EXPECT_EQ(read_bytes(other), pattern_bytes(kBytes, 1));
  return trace;
}

inline void expect_threads_served(const Device& device, const RecordCopy& copy) {
  in_threads(4, [&](size_t thread) {
    const auto seed = static_cast<uint32_t>(thread + 1);
    for (uint32_t round = 0; round < 50; ++round) {
      const uint64_t bytes = 1000 + 100 * round;
      const Tensor from = filled(device, bytes, seed), to = device.tensor(DType::u8, {bytes});
      Encoder encoder(device);
      copy(encoder, from, to);
      if (round % 2 == 0) {
        encoder.submit();
      } else {
        encoder.instantiate().replay();
      }
      EXPECT_EQ(read_bytes(to), pattern_bytes(bytes, seed)) << "a read waits for the work";
    }
  });
}

inline void expect_fences_and_tensors_outlive(const char* name, const RecordCopy& copy) {
  constexpr uint64_t kBytes = 1 << 20;
  Fence fence;
  Tensor to;
  {
    const Device own = Device::open(name, {.kernel_cache = "off"});
    to = own.tensor(DType::u8, {kBytes});
    Encoder encoder(own);
    copy(encoder, filled(own, kBytes, 3), to);
    fence = encoder.submit();
  }
  fence.wait();
  EXPECT_TRUE(fence.done());
  EXPECT_EQ(read_bytes(to), pattern_bytes(kBytes, 3));
}

}  // namespace gyre::test
