#pragma once

#include <dlfcn.h>
#include <gtest/gtest.h>

#include <cstdint>

#include "cuda/context.h"
#include "cuda/driver.h"

namespace gyre::test {

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

  void zero(void* memory, uint64_t bytes) const {
    check(api().memory_set(reinterpret_cast<cuda::CuAddress>(memory), 0, bytes, stream_));
  }
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

// What a stream has captured, as the caller runs it.
class CapturedGraph {
 public:
  explicit CapturedGraph(const ForeignStream& stream)
      : stream_(stream), graph_(stream.end_capture()) {
    ForeignStream::check(ForeignStream::api().graph_instantiate(&exec_, graph_, 0));
  }
  CapturedGraph(const CapturedGraph&) = delete;
  CapturedGraph& operator=(const CapturedGraph&) = delete;
  ~CapturedGraph() {
    ForeignStream::api().graph_exec_destroy(exec_);
    ForeignStream::api().graph_destroy(graph_);
  }

  void run() const {
    stream_.launch(exec_);
    stream_.wait();
  }

 private:
  const ForeignStream& stream_;
  cuda::CuGraph graph_;
  cuda::CuGraphExec exec_ = nullptr;
};

}  // namespace gyre::test
