#include "gyre/device.h"

#include <cstdlib>

#include "cpu/device.h"
#include "expect_error.h"
#include "gyre_test.h"
#include "in_threads.h"
#include "ops/table.h"
#include "runtime/cpu_quota.h"
#include "runtime/test_kernels.h"

namespace gyre::test {
namespace {

// Sets GYRE_THREADS for one scope.
class ThreadsVariable {
 public:
  explicit ThreadsVariable(const char* value) {
    if (const char* text = std::getenv(kName)) before_ = text;
    if (value != nullptr) {
      setenv(kName, value, 1);
    } else {
      unsetenv(kName);
    }
  }
  ThreadsVariable(const ThreadsVariable&) = delete;
  ThreadsVariable& operator=(const ThreadsVariable&) = delete;
  ~ThreadsVariable() {
    if (before_) {
      setenv(kName, before_->c_str(), 1);
    } else {
      unsetenv(kName);
    }
  }

 private:
  static constexpr const char* kName = "GYRE_THREADS";
  std::optional<std::string> before_;
};

TEST(Devices, ListsEveryBackend) {
  std::map<std::string, DeviceInfo> found;
  for (const DeviceInfo& info : devices()) {
    found[info.name.substr(0, info.name.find(':'))] = info;
    EXPECT_EQ(info.available, info.reason.empty()) << info.name << ": " << info.reason;
  }
  ASSERT_TRUE(found.contains("cpu"));
  ASSERT_TRUE(found.contains("cuda"));
  ASSERT_TRUE(found.contains("metal"));
  const DeviceInfo& cpu = found["cpu"];
  EXPECT_TRUE(cpu.available);
  EXPECT_FALSE(cpu.description.empty());
  EXPECT_GT(cpu.compute_units, 0u);
  EXPECT_GT(cpu.memory_bytes, 0u);
}

TEST(Devices, EachOneOpensOrSaysWhyNot) {
  for (const DeviceInfo& info : devices()) {
    if (info.available) {
      EXPECT_EQ(Device::open(info.name).info().name, info.name);
    } else {
      EXPECT_ERROR(unsupported, (info.name, info.reason), Device::open(info.name));
    }
  }
}

TEST(DeviceOpen, RefusesUnknownNames) {
  for (const std::string name : {"", "gpu", "CPU", "cpu ", "cpux", ":0"}) {
    EXPECT_REFUSED(("device.open", "\"" + name + "\"", "cpu"), Device::open(name)) << name;
  }
  for (const std::string name : {"cpu:0", "cpu:1", "cpu:"}) {
    EXPECT_REFUSED(("device.open", "\"" + name + "\""), Device::open(name)) << name;
  }
}

TEST(DeviceOpen, TakesThreadsFromTheOption) {
  const ThreadsVariable variable("5");
  EXPECT_EQ(Device::open("cpu", {.threads = 3}).info().compute_units, 3u) << "the option wins";
}

TEST(DeviceOpen, TakesThreadsFromTheEnvironment) {
  {
    const ThreadsVariable variable("5");
    EXPECT_EQ(Device::open("cpu").info().compute_units, 5u);
  }
  for (const char* none : {static_cast<const char*>(nullptr), ""}) {
    const ThreadsVariable variable(none);
    EXPECT_EQ(Device::open("cpu").info().compute_units, usable_cores());
  }
}

TEST(DeviceOpen, RefusesNonsenseInTheEnvironment) {
  for (const std::string text :
       {"0", "-1", "two", "4 ", " 4", "4x", "+4", "1025", "99999999999999999999"}) {
    const ThreadsVariable variable(text.c_str());
    EXPECT_REFUSED(("device.open", text == "1025" ? "got 1025" : "\"" + text + "\""),
                   Device::open("cpu"))
        << text;
  }
}

TEST(DeviceOpen, LimitsTheThreads) {
  EXPECT_REFUSED(("1024", "got 1025"), Device::open("cpu", {.threads = 1025}));
}

TEST(Device, AnswersWhatItSupports) {
  const Device device = Device::open("cpu", {.threads = 1});
  for (uint32_t source = 0; source <= kDTypeCount; ++source) {
    for (uint32_t cache = 0; cache <= kDTypeCount; ++cache) {
      const KvCopyTypes types{static_cast<DType>(source), static_cast<DType>(cache)};
      EXPECT_EQ(supports(device, types), is_float(types.source) && is_float(types.cache))
          << source << " " << cache;
    }
  }
}

// Every byte is a question with an answer, also those that name no format.
TEST(Device, AnswersWhichFormatsItWrites) {
  const Device device = Device::open("cpu", {.threads = 1});
  for (uint32_t format = 0; format <= 255; ++format) {
    const bool compressed = (format >= 16 && format <= 21) || (format >= 32 && format <= 35);
    const auto which = static_cast<KvFormat>(format);
    EXPECT_EQ(supports(device, KvQuantizeTypes{DType::bf16, which}), compressed) << format;
    EXPECT_FALSE(supports(device, KvQuantizeTypes{DType::u8, which})) << format;
  }
}

TEST(Device, WithoutTheKernelSupportsNothingAndSaysSo) {
  const Device device = open_test_device({.threads = 1});
  EXPECT_FALSE(supports(device, KvCopyTypes{DType::f32, DType::f32}));
  Encoder encoder(device);
  EXPECT_ERROR(unsupported, ("kv_copy", "cpu"),
               kv_copy(encoder, {.k = device.tensor(DType::f32, {1, 1, 1}),
                                 .k_cache = device.tensor(DType::f32, {1, 1, 1})}));
  EXPECT_EQ(encoder.size(), 0u);
}

TEST(Device, ListsItsKernels) {
  const Device device = Device::open("cpu", {.threads = 1});
  const auto kv_copy_row = [&] {
    const auto rows = device.kernels();
    return *std::find_if(rows.begin(), rows.end(),
                         [](const auto& row) { return row.name == "kv_copy"; });
  };
  EXPECT_EQ(kv_copy_row().args, "k read, k_cache write, v read, v_cache write");
  EXPECT_EQ(kv_copy_row().params_bytes, sizeof(abi::KvCopyParams));
  EXPECT_EQ(kv_copy_row().variants, 9u);
  EXPECT_EQ(kv_copy_row().loaded, 0u) << "built when first used";
  EXPECT_TRUE(supports(device, KvCopyTypes{DType::f32, DType::f16}));
  EXPECT_EQ(kv_copy_row().loaded, 0u) << "a question builds nothing";
  Encoder encoder(device);
  const Tensor k = device.tensor(DType::f32, {1, 1, 1}),
               cache = device.tensor(DType::f16, {1, 1, 1});
  for (int i = 0; i < 2; ++i) kv_copy(encoder, {.k = k, .k_cache = cache});
  EXPECT_EQ(kv_copy_row().loaded, 1u) << "and once";
}

TEST(Device, ListsTheKernelsItWasOpenedWith) {
  const auto rows = open_test_device({.threads = 1}).kernels();
  ASSERT_EQ(rows.size(), 3u);
  EXPECT_EQ(rows[0].name, "mix");
  EXPECT_EQ(rows[0].variants, 2u) << "the third spec has no code";
  EXPECT_EQ(rows[2].name, "absent");
  EXPECT_EQ(rows[2].variants, 0u) << "in the list, not in the device's table";
}

// A kernel that the ops forget to list has no row in `gyre kernels` and no shape in traces.
TEST(Device, OpsListEveryKernelOfTheCpu) {
  const auto uses = kernel_uses();
  for (const cpu::CpuKernel& row : cpu::kernel_table()) {
    const auto use = std::find_if(uses.begin(), uses.end(),
                                  [&](const KernelUse& u) { return u.kernel == row.info; });
    ASSERT_NE(use, uses.end()) << row.info->name;
    const std::vector<uint64_t> params((row.info->params_bytes + 7) / 8);
    EXPECT_NE(use->shape(params.data()).find('='), std::string::npos) << row.info->name;
    EXPECT_FALSE(use->specs().empty()) << row.info->name;
    for (const uint64_t spec : use->specs()) {
      EXPECT_NE(row.select(spec), nullptr) << row.info->name << " 0x" << std::hex << spec;
    }
  }
}

TEST(Device, ReturnsTheSamePipelineToAll) {
  const Device device = open_test_device({.threads = 1});
  const std::shared_ptr<const Pipeline> first = impl_of(device)->pipeline(kMix.info, 0);
  EXPECT_EQ(first->kernel, &kMix.info);
  EXPECT_EQ(first->spec, 0u);
  std::atomic<int> others{0};
  in_threads(4, [&](size_t) {
    for (int i = 0; i < 100; ++i)
      others += impl_of(device)->pipeline(kMix.info, 0) == first ? 0 : 1;
  });
  EXPECT_EQ(others.load(), 0);
  EXPECT_NE(impl_of(device)->pipeline(kMix.info, 1), first);
  EXPECT_NE(impl_of(device)->pipeline(kFold.info, 0), first);
  EXPECT_EQ(impl_of(device)->pipeline(kMix.info, kMissingVariant), nullptr);
  EXPECT_EQ(impl_of(device)->loaded_pipelines(kMix.info), 2u);
  EXPECT_TRUE(impl_of(device)->has(kMix.info, 1));
  EXPECT_FALSE(impl_of(device)->has(kMix.info, kMissingVariant));
  EXPECT_FALSE(impl_of(device)->has(kAbsent.info, 0));
}

TEST(Device, CountsAndTrimsMemory) {
  const Device device = Device::open("cpu", {.threads = 1});
  EXPECT_EQ(device.memory().in_use_bytes, 0u);
  {
    const Tensor tensor = device.tensor(DType::f32, {1000});
    EXPECT_GE(device.memory().in_use_bytes, 4000u);
    EXPECT_EQ(device.memory().system_allocations, 1u);
  }
  EXPECT_EQ(device.memory().in_use_bytes, 0u);
  EXPECT_GE(device.memory().cached_bytes, 4000u);
  const Tensor again = device.tensor(DType::f32, {1000});
  EXPECT_EQ(device.memory().reuses, 1u);
  device.trim();
  EXPECT_EQ(device.memory().cached_bytes, 0u);
}

TEST(Device, LargeMemoryIsZeroWhenReused) {
  constexpr uint64_t kCount = 3 << 20;
  const Device device = Device::open("cpu", {.threads = 1});
  for (int round = 0; round < 3; ++round) {
    const Tensor tensor = device.tensor(DType::u8, {kCount});
    const auto data = tensor.data<uint8_t>();
    ASSERT_TRUE(std::all_of(data.begin(), data.end(), [](uint8_t b) { return b == 0; })) << round;
    std::fill(data.begin(), data.end(), uint8_t{0xEE});
  }
  EXPECT_EQ(device.memory().reuses, 2u);
}

TEST(Device, HonoursThePoolLimit) {
  const Device device = Device::open("cpu", {.threads = 1, .pool_limit_bytes = 0});
  device.tensor(DType::f32, {1000});
  EXPECT_EQ(device.memory().cached_bytes, 0u);
}

TEST(Device, MovedFromHandlesAreRefused) {
  Device device = Device::open("cpu", {.threads = 1});
  const Device moved = std::move(device);
  // NOLINTBEGIN(bugprone-use-after-move): that is the test
  EXPECT_REFUSED(("moved from"), device.info());
  EXPECT_REFUSED(("moved from"), device.memory());
  EXPECT_REFUSED(("moved from"), device.trim());
  EXPECT_REFUSED(("moved from"), device.tensor(DType::f32, {1}));
  EXPECT_REFUSED(("moved from"), supports(device, KvCopyTypes{DType::f32, DType::f32}));
  EXPECT_REFUSED(("moved from"), device.kernels());
  EXPECT_REFUSED(("moved from"), device.wait());
  EXPECT_REFUSED(("moved from"), device.stream());
  EXPECT_REFUSED(("moved from"), device.start_trace());
  std::byte memory[4] = {};
  EXPECT_REFUSED(("moved from"), device.wrap(memory, DType::u8, {4}));
  // NOLINTEND(bugprone-use-after-move)
  EXPECT_EQ(moved.info().name, "cpu");
}

TEST(Device, OnTheCpuThereIsNothingToWaitFor) {
  const Device device = Device::open("cpu", {.threads = 1});
  device.wait();
  EXPECT_EQ(device.stream(), 0u);
}

TEST(Device, CopiesAreTheSameDevice) {
  const Device device = Device::open("cpu", {.threads = 1});
  const Device copy =
      device;  // NOLINT(performance-unnecessary-copy-initialization): the copy is the test
  Encoder encoder(copy);
  kv_copy(encoder, {.k = device.tensor(DType::f32, {1, 1, 1}),
                    .k_cache = device.tensor(DType::f32, {1, 1, 1})});
  EXPECT_EQ(encoder.size(), 1u);
}

}  // namespace
}  // namespace gyre::test
