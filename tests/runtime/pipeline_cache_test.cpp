#include "runtime/pipeline_cache.h"

#include "abi/kernels.h"
#include "gyre_test.h"
#include "runtime/recorder.h"

namespace gyre::test {
namespace {

class PipelineCacheTest : public testing::Test {
 protected:
  using Made = std::unique_ptr<Pipeline>;

  // Counts how often it is really asked.
  template <class Make>
  std::shared_ptr<const Pipeline> ask(uint64_t spec, const Make& make) {
    return cache_.find_or_make(kKvCopy.info, spec, [&] {
      ++builds_;
      return make();
    });
  }
  static Made made() { return std::make_unique<Pipeline>(kKvCopy.info, 0); }
  static Made none() { return nullptr; }

  PipelineCache cache_;
  int builds_ = 0;
};

TEST_F(PipelineCacheTest, BuildsOnce) {
  const auto first = ask(1, made);
  EXPECT_NE(first, nullptr);
  EXPECT_EQ(ask(1, made), first);
  EXPECT_EQ(builds_, 1);
  EXPECT_NE(ask(2, made), first);
  EXPECT_EQ(cache_.count(kKvCopy.info), 2u);
  EXPECT_EQ(cache_.count(kRope.info), 0u);
}

TEST_F(PipelineCacheTest, RemembersThatThereIsNone) {
  EXPECT_EQ(ask(1, none), nullptr);
  EXPECT_EQ(ask(1, made), nullptr);
  EXPECT_EQ(builds_, 1);
  EXPECT_EQ(cache_.count(kKvCopy.info), 0u);
}

// Built later: counted when it is.
struct Later : Pipeline {
  Later() : Pipeline(kKvCopy.info, 0) { set_built(false); }
  void wait() const override { set_built(true); }
};

TEST_F(PipelineCacheTest, CountsWhatIsBuilt) {
  const auto later = ask(1, [] { return std::make_unique<Later>(); });
  EXPECT_EQ(cache_.count(kKvCopy.info), 0u);
  later->finish();
  EXPECT_TRUE(later->is_built());
  EXPECT_EQ(cache_.count(kKvCopy.info), 1u);
  EXPECT_EQ(ask(1, made), later);
}

void no_task(const void*, const uint64_t*, uint32_t, uint32_t) noexcept {}

CustomKernel custom(const std::string& name) {
  return CustomKernel(
      {.name = name, .args = {{"x", Access::read_write}}, .params_bytes = 8, .cpu = no_task});
}

// What a device has of custom kernels, seen from their pipelines.
class CustomPipelines : public testing::Test {
 protected:
  // The pipeline of the command that was recorded last.
  std::weak_ptr<const Pipeline> record(Encoder& encoder, const CustomKernel& kernel) {
    kernel(encoder, uint64_t{1}, {x_}, {});
    Recording recording(encoder, "test");
    recording.commit();
    return recording.list().pipelines.back();
  }
  // So many that the device looks which of the old ones are still of use.
  void make_others() {
    Encoder encoder(device_);
    for (int i = 0; i < 40; ++i) record(encoder, custom("other"));
  }

  Device device_ = Device::open("cpu", {.threads = 1});
  Tensor x_ = device_.tensor(DType::f32, {1});
};

TEST_F(CustomPipelines, GoWithTheLastHandle) {
  std::optional<CustomKernel> kernel(custom("kept"));
  std::optional<CustomKernel> copy(*kernel);
  Encoder encoder(device_);
  const std::weak_ptr<const Pipeline> pipeline = record(encoder, *kernel);
  encoder.submit().wait();
  kernel.reset();
  make_others();
  ASSERT_FALSE(pipeline.expired()) << "a copy of the handle can record it";
  EXPECT_EQ(record(encoder, *copy).lock(), pipeline.lock()) << "made twice";
  encoder.clear();
  copy.reset();
  make_others();
  EXPECT_TRUE(pipeline.expired());
}

TEST_F(CustomPipelines, ARecordedListHoldsThem) {
  Encoder encoder(device_);
  const std::weak_ptr<const Pipeline> pipeline = record(encoder, custom("gone"));
  make_others();
  device_.trim();
  ASSERT_FALSE(pipeline.expired());
  encoder.submit().wait();
  EXPECT_TRUE(pipeline.expired()) << "by what?";
}

TEST_F(CustomPipelines, AGraphHoldsThem) {
  Encoder encoder(device_);
  const std::weak_ptr<const Pipeline> pipeline = record(encoder, custom("gone"));
  std::optional<Graph> graph(encoder.instantiate());
  device_.trim();
  ASSERT_FALSE(pipeline.expired());
  graph->replay().wait();
  graph.reset();
  EXPECT_TRUE(pipeline.expired());
}

TEST_F(CustomPipelines, GoWithWhatIsTakenBack) {
  Encoder encoder(device_);
  std::weak_ptr<const Pipeline> pipeline;
  {
    const RecordingGroup group(encoder);
    pipeline = record(encoder, custom("taken back"));
  }
  device_.trim();
  EXPECT_TRUE(pipeline.expired());
  // Another kernel may have its address: it must not be found in the encoder's own cache.
  for (int i = 0; i < 20; ++i) record(encoder, custom("next"));
  encoder.submit().wait();
}

// As many are kept as are in use, and a few: whatever else there was.
TEST_F(CustomPipelines, AreBoundedByWhatIsInUse) {
  std::vector<std::weak_ptr<const Pipeline>> all;
  Encoder encoder(device_);
  for (int i = 0; i < 1000; ++i) {
    all.push_back(record(encoder, custom("one of many")));
    encoder.submit();
  }
  const auto living = std::ranges::count_if(all, [](const auto& one) { return !one.expired(); });
  EXPECT_LE(living, 17);
  device_.trim();
  EXPECT_TRUE(std::ranges::all_of(all, [](const auto& one) { return one.expired(); }));
}

}  // namespace
}  // namespace gyre::test
