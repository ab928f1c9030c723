#include "gyre/trace.h"

#include <chrono>
#include <locale>
#include <nlohmann/json.hpp>
#include <sstream>
#include <thread>

#include "expect_error.h"
#include "gyre_test.h"
#include "run_now.h"
#include "runtime/test_kernels.h"

namespace gyre::test {
namespace {

using Json = nlohmann::json;

class TraceTest : public testing::Test {
 protected:
  // Two commands side by side, one behind them.
  void record_three(Encoder& encoder) const {
    const Tensor source = device_.tensor(DType::u8, {64}), left = device_.tensor(DType::u8, {64});
    const Tensor right = device_.tensor(DType::u8, {32});
    record_mix(encoder, {.a = source, .out = left, .tasks = 4});
    record_mix(encoder, {.a = source, .out = right, .tasks = 2});
    record_fold(encoder, {.a = right, .out = left, .tasks = 1, .slow_ns = 20000});
  }
  Trace trace_three() const {
    device_.start_trace();
    record_three(RunNow(device_));
    return device_.stop_trace();
  }

  Device device_ = open_test_device({.threads = 2});
};

TEST_F(TraceTest, IsOffByDefault) {
  record_three(RunNow(device_));
  const Trace trace = device_.stop_trace();
  EXPECT_TRUE(trace.events.empty());
  EXPECT_EQ(trace.dropped, 0u);
}

TEST_F(TraceTest, NotesEveryCommand) {
  const Trace trace = trace_three();
  ASSERT_EQ(trace.events.size(), 3u);
  EXPECT_EQ(trace.dropped, 0u);
  const TraceEvent& last = trace.events[2];
  EXPECT_EQ(trace.events[0].kernel, "mix");
  EXPECT_EQ(last.kernel, "fold");
  EXPECT_EQ(trace.events[0].shape, "bytes=64");
  EXPECT_EQ(trace.events[1].shape, "bytes=32");
  EXPECT_FALSE(trace.events[0].barrier);
  EXPECT_FALSE(trace.events[1].barrier);
  EXPECT_TRUE(last.barrier);
  for (uint32_t i = 0; i < 3; ++i) {
    EXPECT_EQ(trace.events[i].command, i);
    EXPECT_EQ(trace.events[i].submission, 0u);
    EXPECT_FALSE(trace.events[i].spans.empty());
  }
  EXPECT_GE(last.duration_ns(), 20000u) << "it was told to take that long";
  for (uint32_t i = 0; i < 2; ++i) {
    EXPECT_GE(last.begin_ns(), trace.events[i].begin_ns() + trace.events[i].duration_ns())
        << "it waited";
  }
}

TEST_F(TraceTest, CountsSubmitsAndReplays) {
  device_.start_trace();
  Encoder encoder(device_);
  record_three(encoder);
  const Graph graph = encoder.instantiate();
  graph.replay().wait();
  graph.replay().wait();
  record_three(encoder);
  encoder.submit().wait();
  const Trace trace = device_.stop_trace();
  ASSERT_EQ(trace.events.size(), 9u);
  for (size_t i = 0; i < 9; ++i) EXPECT_EQ(trace.events[i].submission, i / 3);
}

TEST_F(TraceTest, HoldsWhatRanBetweenStartAndStop) {
  EXPECT_EQ(trace_three().events.size(), 3u);
  Encoder encoder(device_);
  record_three(encoder);
  encoder.submit().wait();  // not traced
  EXPECT_TRUE(device_.stop_trace().events.empty());
  EXPECT_EQ(trace_three().events.size(), 3u) << "a second trace starts from nothing";
  device_.start_trace();
  record_three(encoder);
  encoder.submit().wait();
  device_.start_trace();
  EXPECT_TRUE(device_.stop_trace().events.empty()) << "a new start drops what an earlier one saw";
}

TEST_F(TraceTest, CommandsWithoutTasksAppear) {
  device_.start_trace();
  record_mix(RunNow(device_), {.out = device_.tensor(DType::u8, {4}), .tasks = 0});
  const Trace trace = device_.stop_trace();
  ASSERT_EQ(trace.events.size(), 1u);
  EXPECT_EQ(trace.events[0].duration_ns(), 0u);
}

TEST_F(TraceTest, TextHasALinePerCommand) {
  const Trace trace = trace_three();
  std::ostringstream out;
  trace.write_text(out);
  std::istringstream lines(out.str());
  std::string line;
  std::vector<std::string> all;
  while (std::getline(lines, line)) all.push_back(line);
  ASSERT_EQ(all.size(), 3u);
  EXPECT_NE(all[0].find("0.0 mix"), std::string::npos) << all[0];
  EXPECT_NE(all[0].find("spec=0x0000000000000000"), std::string::npos) << all[0];
  EXPECT_NE(all[0].find("bytes=64"), std::string::npos) << all[0];
  EXPECT_EQ(all[0].find("barrier"), std::string::npos) << all[0];
  EXPECT_NE(all[2].find("0.2 fold"), std::string::npos) << all[2];
  EXPECT_NE(all[2].find("barrier"), std::string::npos) << all[2];
  EXPECT_NE(all[2].find("duration_us="), std::string::npos) << all[2];
}

TEST_F(TraceTest, TableAddsUpPerKernel) {
  Trace trace;
  const auto event = [](const char* kernel, uint64_t begin, uint64_t end) {
    TraceEvent e;
    e.kernel = kernel;
    e.spans = {{0, begin, end}};
    return e;
  };
  trace.events = {event("small", 0, 1000), event("large", 0, 5000), event("large", 9000, 12000)};
  std::ostringstream out;
  trace.write_table(out);
  std::istringstream lines(out.str());
  std::string header;
  std::getline(lines, header);
  for (const char* column : {"kernel", "count", "total", "min", "max"}) {
    EXPECT_NE(header.find(column), std::string::npos) << header;
  }
  std::string kernel;
  uint64_t count = 0;
  double total = 0, min = 0, max = 0;
  ASSERT_TRUE(lines >> kernel >> count >> total >> min >> max);
  EXPECT_EQ(kernel, "large") << "most time first";
  EXPECT_EQ(count, 2u);
  EXPECT_DOUBLE_EQ(total, 8);
  EXPECT_DOUBLE_EQ(min, 3);
  EXPECT_DOUBLE_EQ(max, 5);
  ASSERT_TRUE(lines >> kernel >> count);
  EXPECT_EQ(kernel, "small");
  EXPECT_EQ(count, 1u);
}

TEST_F(TraceTest, ChromeTraceIsJson) {
  const Trace trace = trace_three();
  std::ostringstream out;
  trace.write_chrome(out);
  const Json json = Json::parse(out.str());
  const Json& events = json.at("traceEvents");
  size_t spans = 0;
  for (const TraceEvent& event : trace.events) spans += event.spans.size();
  ASSERT_EQ(events.size(), spans);
  for (const Json& event : events) {
    EXPECT_EQ(event.at("ph"), "X");
    EXPECT_TRUE(event.at("ts").is_number());
    EXPECT_GE(event.at("dur").get<double>(), 0);
    EXPECT_TRUE(event.at("tid").is_number_unsigned());
    EXPECT_TRUE(event.at("pid").is_number_unsigned());
  }
  const Json& fold = events.back();
  EXPECT_EQ(fold.at("name"), "fold");
  EXPECT_EQ(fold.at("args").at("barrier"), true);
  EXPECT_EQ(fold.at("args").at("shape"), "bytes=64");
  EXPECT_EQ(fold.at("args").at("spec"), "0x0000000000000000");
  EXPECT_EQ(fold.at("args").at("command"), 2);
  EXPECT_GE(fold.at("dur").get<double>(), 20.0) << "microseconds";
}

TEST_F(TraceTest, EmptyTracesWriteValidFiles) {
  std::ostringstream text;
  std::ostringstream chrome;
  Trace().write_text(text);
  Trace().write_chrome(chrome);
  EXPECT_EQ(text.str(), "");
  EXPECT_TRUE(Json::parse(chrome.str()).at("traceEvents").empty());
}

// A custom kernel may be called anything.
TEST_F(TraceTest, NamesAreEscaped) {
  Trace trace;
  trace.events.push_back({.kernel = "a \"quote\", a \\ and a\nline", .spans = {{0, 1, 2}}});
  std::ostringstream out;
  trace.write_chrome(out);
  EXPECT_EQ(Json::parse(out.str())["traceEvents"][0]["name"], trace.events[0].kernel);
}

TEST_F(TraceTest, WritersLeaveTheStreamAsItWas) {
  std::ostringstream out;
  const Trace trace = trace_three();
  trace.write_text(out);
  trace.write_table(out);
  trace.write_chrome(out);
  out.str("");
  out << 0.5 << ' ' << 255;
  EXPECT_EQ(out.str(), "0.5 255");
}

TEST_F(TraceTest, SaysHowMuchItDropped) {
  constexpr uint32_t kLimit = 1 << 20;
  Encoder encoder(device_);
  for (uint32_t i = 0; i < kLimit / 4; ++i) record_mix(encoder, {.tasks = 0});
  const Graph graph = encoder.instantiate();
  device_.start_trace();
  for (int i = 0; i < 4; ++i) graph.replay().wait();
  record_three(encoder);
  encoder.submit().wait();
  const Trace trace = device_.stop_trace();
  EXPECT_EQ(trace.events.size(), kLimit);
  EXPECT_EQ(trace.dropped, 3u);
  std::ostringstream out;
  Trace only_dropped;
  only_dropped.dropped = trace.dropped;
  only_dropped.write_table(out);
  EXPECT_NE(out.str().find("3 events"), std::string::npos);
}

// A list that is still running when the trace is started anew belongs to neither: its times are
// from before.
TEST_F(TraceTest, RestartingWhileWorkRunsGivesNoNonsense) {
  device_.start_trace();
  std::this_thread::sleep_for(std::chrono::milliseconds(30));
  std::thread worker([&] {
    record_mix(RunNow(device_),
               {.out = device_.tensor(DType::u8, {4}), .tasks = 1, .slow_ns = 20000000});
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(10));
  device_.stop_trace();
  device_.start_trace();
  worker.join();
  for (const TraceEvent& event : device_.stop_trace().events) {
    EXPECT_LT(event.duration_ns(), 10000000000u) << "ends before it begins";
  }
}

// kv_copy says what it copies.
TEST(KvCopyTrace, NamesTheShape) {
  const Device device = Device::open("cpu", {.threads = 1});
  device.start_trace();
  const Tensor cache = device.tensor(DType::f16, {2, 16, 64});
  kv_copy(RunNow(device),
          {.k = device.tensor(DType::f32, {3, 2, 64}), .k_cache = cache.permute({1, 0, 2})},
          {.position = 5});
  const Trace trace = device.stop_trace();
  ASSERT_EQ(trace.events.size(), 1u);
  EXPECT_EQ(trace.events[0].kernel, "kv_copy");
  for (const char* part : {"tokens=3", "2x64", "slot=5", "capacity=16"}) {
    EXPECT_NE(trace.events[0].shape.find(part), std::string::npos) << trace.events[0].shape;
  }
}

// Numbers with a comma, and dots between thousands, as some locales write them.
struct Comma : std::numpunct<char> {
  char do_decimal_point() const override { return ','; }
  char do_thousands_sep() const override { return '.'; }
  std::string do_grouping() const override { return "\3"; }
};

TEST(TraceLocale, JsonIsTheSameInEveryLocale) {
  Trace trace;
  trace.events.push_back({.kernel = "rope",
                          .submission = 1234567,
                          .spans = {{.thread = 0, .begin_ns = 1234567890, .end_ns = 1234567999}}});
  std::ostringstream plain, comma;
  comma.imbue(std::locale(std::locale::classic(), new Comma));
  trace.write_chrome(plain);
  trace.write_chrome(comma);
  EXPECT_EQ(comma.str(), plain.str());
  const Json json = Json::parse(comma.str());
  EXPECT_EQ(json["traceEvents"][0]["ts"], 1234567.890);
  EXPECT_EQ(json["traceEvents"][0]["args"]["submission"], 1234567);
  comma.str("");
  comma << 1.5;
  EXPECT_EQ(comma.str(), "1,5") << "the stream has its locale again";
}

// Whatever the locale of the process is.
TEST(TraceLocale, ShapesAndMessagesHavePlainNumbers) {
  const Device device = Device::open("cpu", {.threads = 1});
  const Tensor from = device.tensor(DType::f32, {4096, 2, 16});
  const Tensor to = device.tensor(DType::f32, {4096, 2, 16});
  const std::locale before = std::locale::global(std::locale(std::locale::classic(), new Comma));
  device.start_trace();
  kv_copy(RunNow(device), {.k = from, .k_cache = to});
  const Trace trace = device.stop_trace();
  const auto refused = throws_error(ErrorCode::invalid_argument, {"asked for 1234567 from 0"},
                                    [&] { (void)from.slice(0, 0, 1234567); });
  std::locale::global(before);
  EXPECT_TRUE(refused);
  ASSERT_EQ(trace.events.size(), 1u);
  EXPECT_NE(trace.events[0].shape.find("tokens=4096"), std::string::npos) << trace.events[0].shape;
}

}  // namespace
}  // namespace gyre::test
