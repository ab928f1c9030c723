// The stand-in refuses what Metal refuses, and the texts of the library's kernels are whole.
#include <regex>

#include "expect_error.h"
#include "gyre_test.h"
#include "metal/device.h"
#include "metal/kernels.h"
#include "metal/sources.h"
#include "metal/test_kernels.h"
#include "metal_host/host_kernel.h"
#include "metal_host/standin_driver.h"
#include "runtime/recorder.h"

namespace gyre::test {
namespace {

using namespace metal_host;
using metal::Binding;
using metal::Dispatch;

class Standin : public testing::Test {
 protected:
  void SetUp() override {
    queue_ = api_.queue_make();
    library_ = api_.library_make("kernel void test_copy(").library;
    ASSERT_NE(library_, nullptr);
    state_ = api_.pipeline_make(library_, "test_copy", {1, 2}).state;
    ASSERT_NE(state_, nullptr);
    from_ = api_.buffer_make(100);
    to_ = api_.buffer_make(100);
  }
  void TearDown() override {
    api_.queue_free(queue_);
    api_.pipeline_free(state_);
    api_.library_free(library_);
    api_.buffer_free(from_);
    api_.buffer_free(to_);
    clear_standin_violations();
  }

  Dispatch copy() const {
    Dispatch made;
    made.state = state_;
    made.params = &params_;
    made.params_bytes = sizeof(params_);
    made.bindings = {Binding{from_, 0}, Binding{to_, 0}};
    made.binding_count = 2;
    made.arguments = 3;
    made.threads = 32;
    return made;
  }
  std::string error_of(const std::function<void(Dispatch&)>& change) const {
    Dispatch dispatch = copy();
    change(dispatch);
    metal::Commands* const commands = api_.begin(queue_);
    api_.dispatch(commands, dispatch);
    api_.commit(commands);
    api_.wait(commands);
    std::string error = api_.error(commands);
    api_.commands_free(commands);
    return error;
  }

  const metal::Driver& api_ = standin_driver();
  MixParams params_{.out_bytes = 100};
  metal::Queue* queue_ = nullptr;
  metal::Library* library_ = nullptr;
  metal::PipelineState* state_ = nullptr;
  metal::Buffer *from_ = nullptr, *to_ = nullptr;
};

TEST_F(Standin, RefusesWhatMetalRefuses) {
  EXPECT_EQ(error_of([](Dispatch&) {}), "");
  const auto refuses = [&](const char* part, const std::function<void(Dispatch&)>& change) {
    const std::string error = error_of(change);
    EXPECT_NE(error.find(part), std::string::npos) << error;
  };
  refuses("pipeline", [](Dispatch& d) { d.state = nullptr; });
  refuses("setBytes", [](Dispatch& d) { d.params_bytes = 0; });
  refuses("setBytes", [](Dispatch& d) { d.params_bytes = 4097; });
  refuses("arguments", [](Dispatch& d) { d.binding_count = 17; });
  refuses("0 threadgroups", [](Dispatch& d) { d.grid[1] = 0; });
  refuses("threads", [](Dispatch& d) { d.threads = 0; });
  refuses("threads", [](Dispatch& d) { d.threads = 1025; });
  refuses("at most 32768", [](Dispatch& d) { d.threadgroup_bytes = 32784; });
  refuses("multiple of 16", [](Dispatch& d) { d.threadgroup_bytes = 24; });
  refuses("no buffer", [](Dispatch& d) { d.bindings[1].buffer = nullptr; });
  refuses("offset", [](Dispatch& d) { d.bindings[1].offset = 100; });
  EXPECT_EQ(error_of([](Dispatch& d) { d.threads = 1024; }), "");
  EXPECT_TRUE(standin_violations().empty());
}

TEST_F(Standin, NoticesABufferThatIsFreedWhileWorkUsesIt) {
  metal::Buffer* const extra = api_.buffer_make(100);
  metal::Commands* commands = nullptr;
  {
    const HoldQueues hold;
    commands = api_.begin(queue_);
    Dispatch dispatch = copy();
    dispatch.bindings[0].buffer = extra;
    api_.dispatch(commands, dispatch);
    api_.commit(commands);
    api_.buffer_free(extra);
    ASSERT_EQ(standin_violations().size(), 1u);
  }
  api_.wait(commands);
  EXPECT_NE(api_.error(commands).find("freed while work uses it"), std::string::npos);
  api_.commands_free(commands);
  clear_standin_violations();
  api_.buffer_free(extra);
  EXPECT_TRUE(standin_violations().empty());
}

TEST_F(Standin, NoticesBytesBehindTheEnd) {
  metal::Buffer* const small = api_.buffer_make(99);
  EXPECT_EQ(error_of([&](Dispatch& d) { d.bindings[1].buffer = small; }), "");
  api_.buffer_free(small);  // the copy wrote 100 bytes; the pattern behind 99 has another value
  ASSERT_EQ(standin_violations().size(), 1u);
  EXPECT_NE(standin_violations()[0].find("behind the end"), std::string::npos);
}

TEST_F(Standin, OrderBetweenBarriersIsRandomAndKeptAcrossThem) {
  // Two copies into the same buffer: either may be the last, unless a barrier is between them.
  metal::Buffer* const ones = api_.buffer_make(100);
  auto* const bytes = static_cast<uint8_t*>(api_.buffer_contents(ones));
  std::fill_n(bytes, 100, uint8_t{1});
  const auto last = [&](bool with_barrier) {
    metal::Commands* const commands = api_.begin(queue_);
    Dispatch second = copy();
    second.bindings[0].buffer = ones;
    api_.dispatch(commands, copy());
    if (with_barrier) api_.barrier(commands);
    api_.dispatch(commands, second);
    api_.commit(commands);
    api_.wait(commands);
    EXPECT_EQ(api_.error(commands), "");
    EXPECT_GT(api_.gpu_ns(commands), 0u);
    api_.commands_free(commands);
    return *static_cast<const uint8_t*>(api_.buffer_contents(to_));
  };
  int seconds = 0;
  for (int i = 0; i < 100; ++i) {
    EXPECT_EQ(last(true), 1);
    seconds += last(false);
  }
  EXPECT_GT(seconds, 20);
  EXPECT_LT(seconds, 80);
  api_.buffer_free(ones);
}

TEST_F(Standin, CompilesWholeTextsOnly) {
  EXPECT_NE(api_.library_make("#include \"abi/types.h\"\n").error, "");
  EXPECT_NE(api_.pipeline_make(library_, "test_mix", {0, 0}).error, "");
}

// The library's kernel without its code: it notes the Spec alone.
std::pair<uint32_t, uint32_t> noted_spec;
[[maybe_unused]] const bool kRegistered = register_kernel({"kv_copy", [](const HostDispatch& d) {
                                                             noted_spec = {d.spec_low, d.spec_high};
                                                           }});

TEST(MetalBuild, ASpecIsTwoFunctionConstants) {
  const Device device = Device::open("metal");
  const Tensor k = device.tensor(DType::f32, {1, 1, 4}),
               cache = device.tensor(DType::f16, {1, 1, 4});
  Encoder encoder(device);
  Recording recording(encoder, "copy");
  abi::KvCopyParams params{};
  params.tokens = params.heads = params.streams = 1;
  params.stream[0].row_elements = 4;
  const Tensor* const args[] = {&k, &cache, nullptr, nullptr};
  recording.dispatch(kKvCopy.info, 0x1122334455660100u, &params, args);
  recording.list().finish_pipelines();
  impl_of(device)->submit(recording.list())->wait();
  EXPECT_EQ(noted_spec.first, 0x55660100u);
  EXPECT_EQ(noted_spec.second, 0x11223344u);
}

TEST(MetalBuild, KernelsAreBuiltAheadAndToldOf) {
  const auto device = metal::open_device("metal", {}, {});
  const KernelKey keys[] = {{&kKvCopy.info, spec_key(abi::KvCopySpec{0, 0})},
                            {&kKvCopy.info, spec_key(abi::KvCopySpec{0, 1})}};
  for (const bool first : {true, false}) {
    uint64_t told = 0;
    device->build(keys, [&](const BuiltKernel& built) {
      EXPECT_EQ(built.name, "metal kv_copy");
      EXPECT_EQ(built.compiled, first);
      EXPECT_EQ(built.done, ++told);
      EXPECT_EQ(built.all, 2u);
    });
    EXPECT_EQ(told, 2u);
    EXPECT_EQ(device->loaded_pipelines(kKvCopy.info), 2u);
  }
}

TEST(MetalBuild, WhatCannotBeBuiltIsThrown) {
  const auto device = metal::open_device("metal", {}, {});
  const KernelInfo unknown{.name = "unknown"};
  EXPECT_TRUE(refused({"prepare", "unknown"}, [&] {
    const KernelKey key{&unknown, 0};
    device->build({&key, 1}, [](const BuiltKernel&) {});
  }));
  EXPECT_REFUSED(("device.describe", "unknown"), device->describe(unknown, 0));
  fail_compile("error: expected ';'");
  EXPECT_TRUE(throws_error(ErrorCode::compile_failed, {"kv_copy.metal", "expected ';'"}, [&] {
    const KernelKey key{&kKvCopy.info, 0};
    device->build({&key, 1}, [](const BuiltKernel&) { ADD_FAILURE() << "it was not built"; });
  }));
  fail_compile("");
  EXPECT_EQ(device->loaded_pipelines(kKvCopy.info), 0u);
}

TEST(MetalSources, EveryKernelsTextIsWhole) {
  EXPECT_FALSE(metal::kernel_table().empty());
  for (const metal::MetalKernel& row : metal::kernel_table()) {
    const std::string text = metal::kernel_text(row.file);
    EXPECT_EQ(text.find("#include \""), text.npos) << row.file;
    EXPECT_EQ(text.find("#pragma once"), text.npos) << row.file;
    const std::regex begin("#line 1 \"([^\"]+)\"");
    std::set<std::string> files;
    for (std::sregex_iterator at(text.begin(), text.end(), begin), end; at != end; ++at)
      EXPECT_TRUE(files.insert((*at)[1]).second) << row.file << ": " << (*at)[1] << " twice";
    EXPECT_TRUE(files.contains(std::string("metal/kernels/") + row.file));
    const std::string stem = std::string(row.file).substr(0, std::string(row.file).find('.'));
    const std::regex entry("kernel void " + stem + "\\(");
    const auto count = std::distance(std::sregex_iterator(text.begin(), text.end(), entry),
                                     std::sregex_iterator());
    EXPECT_EQ(count, 1) << row.file << " " << row.info->name;
    EXPECT_LE(row.info->params_bytes, metal::kMaxParamsBytes) << row.info->name;
  }
}

TEST(MetalSources, AFileThatIsMissingIsNamed) {
  EXPECT_ERROR(compile_failed, ("metal/kernels/none.metal"), metal::kernel_text("none.metal"));
}

}  // namespace
}  // namespace gyre::test
