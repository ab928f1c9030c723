// What `gyre bench` measures for which flags, on the CPU and on a GPU, without measuring much.
#include "bench.h"
#include "expect_error.h"
#include "gpu_attention.h"
#include "runtime/require.h"

namespace gyre::test {
namespace {

using bench::AttentionChoice;
using bench::AttentionRun;
using bench::AttentionShape;
using bench::Options;

// "32/8/128 at 4096: f16 tq8", with the queries where there are several.
std::string text(const AttentionRun& run) {
  const AttentionShape& s = run.shape;
  std::string line = join(s.heads, "/", s.kv_heads, "/", s.head_dim, " at ", s.context, ":");
  for (const bench::FormatPair& pair : run.formats) line += join(" ", pair.label());
  return s.tokens == 1 ? line : join(line, ", ", s.tokens, " queries");
}

std::vector<std::string> texts(const std::vector<AttentionRun>& runs) {
  std::vector<std::string> lines;
  for (const AttentionRun& run : runs) lines.push_back(text(run));
  return lines;
}

using Lines = std::vector<std::string>;

// The figures in the documents, and every comparison of two builds, are of these rows.
TEST(BenchAttention, StandardShapesOfTheGpu) {
  const std::string every = " f16 bf16 tq8 tq8/tq4 tq6 tq5 tq4 tq3 tq2", few = " f16 tq8 tq4";
  const auto runs = bench::gpu_attention_runs({});
  EXPECT_EQ(
      texts(runs),
      (Lines{"32/8/128 at 4096:" + every, "32/8/128 at 32768:" + every,
             "32/8/128 at 131072:" + every, "16/8/256 at 4096:" + few, "16/8/256 at 32768:" + few,
             "16/8/256 at 131072:" + few, "1024/256/128 at 4096:" + few, "8/8/128 at 32768:" + few,
             "16/8/128 at 32768:" + few, "48/8/128 at 32768:" + few, "56/8/128 at 32768:" + few,
             "64/8/128 at 32768:" + few, "96/8/128 at 32768:" + few, "128/8/128 at 32768:" + few,
             "32/8/64 at 65536:" + few, "32/8/512 at 8192:" + few, "32/8/128 at 32749:" + few}));
  for (size_t i = 0; i < runs.size(); ++i) EXPECT_EQ(runs[i].errors, i == 0) << text(runs[i]);
}

TEST(BenchAttention, StandardShapesOfTheCpu) {
  const std::string usual = " f16 tq8 tq4 tq3 tq8/tq4";
  EXPECT_EQ(texts(bench::cpu_attention_runs({})),
            (Lines{"8/8/128 at 16384:" + usual, "32/8/128 at 16384:" + usual,
                   "16/8/256 at 16384:" + usual, "32/8/128 at 1024:" + usual,
                   "32/8/128 at 4096:" + usual + ", 512 queries"}));
}

// Every flag alone, and all of them, mean the same on both.
TEST(BenchAttention, EveryFlagCounts) {
  const std::string usual = " f16 tq8 tq4 tq3 tq8/tq4";
  const auto expect = [](const AttentionChoice& choice, const Lines& lines) {
    EXPECT_EQ(texts(bench::cpu_attention_runs(choice)), lines);
    EXPECT_EQ(texts(bench::gpu_attention_runs(choice)), lines);
  };
  expect({.heads = 16}, {"16/8/128 at 1024:" + usual, "16/8/128 at 16384:" + usual});
  expect({.kv_heads = 4}, {"32/4/128 at 1024:" + usual, "32/4/128 at 16384:" + usual});
  expect({.head_dim = 64}, {"32/8/64 at 1024:" + usual, "32/8/64 at 16384:" + usual});
  expect({.tokens = 7}, {"32/8/128 at 1024:" + usual + ", 7 queries",
                         "32/8/128 at 16384:" + usual + ", 7 queries"});
  expect({.tokens = 4096}, {"32/8/128 at 4096:" + usual + ", 4096 queries",
                            "32/8/128 at 16384:" + usual + ", 4096 queries"});
  expect({.tokens = 16385}, {"32/8/128 at 16385:" + usual + ", 16385 queries"});
  expect({.contexts = {5, 3}}, {"32/8/128 at 5:" + usual, "32/8/128 at 3:" + usual});
  expect({.heads = 28,
          .kv_heads = 4,
          .head_dim = 96,
          .tokens = 2,
          .contexts = {9},
          .formats = {{KvFormat::tq6, KvFormat::f16}}},
         {"28/4/96 at 9: tq6/f16, 2 queries"});
}

TEST(BenchAttention, FormatsAloneKeepTheShapes) {
  const AttentionChoice choice{.formats = {{KvFormat::tq5, KvFormat::tq5}}};
  for (const auto& [chosen, standard] :
       {std::pair(bench::cpu_attention_runs(choice), bench::cpu_attention_runs({})),
        std::pair(bench::gpu_attention_runs(choice), bench::gpu_attention_runs({}))}) {
    ASSERT_EQ(chosen.size(), standard.size());
    for (size_t i = 0; i < chosen.size(); ++i) {
      EXPECT_EQ(chosen[i].formats, choice.formats);
      EXPECT_EQ(chosen[i].shape.context, standard[i].shape.context);
    }
  }
}

TEST(BenchAttention, FlopsAreOfWhatIsSeen) {
  const auto flops = [](uint64_t context, uint64_t tokens) {
    double seen = 0;
    for (uint64_t i = 0; i < tokens; ++i) seen += static_cast<double>(context - tokens + i + 1);
    return 4 * seen * 6 * 32;
  };
  for (const auto& [context, tokens] :
       {std::pair{1, 1}, std::pair{100, 1}, std::pair{100, 7}, std::pair{100, 100}})
    EXPECT_DOUBLE_EQ(bench::attention_flops(
                         {6, 2, 32, static_cast<uint64_t>(context), static_cast<uint64_t>(tokens)}),
                     flops(static_cast<uint64_t>(context), static_cast<uint64_t>(tokens)));
}

void expect_refused(const std::vector<std::string>& parts, const Options& options) {
  EXPECT_TRUE(refused(parts, [&] { bench::check(options); }));
  EXPECT_TRUE(refused(parts, [&] { bench::run(options, {}); }));  // before any progress
}

TEST(BenchOptions, RefusesShapesOnBoth) {
  for (const char* device : {"cpu", "cuda:0"}) {
    const auto with = [&](const AttentionChoice& attention) {
      return Options{.filter = "attention", .device = device, .attention = attention};
    };
    expect_refused({"--tokens", "at most --context", "512 and 16"},
                   with({.tokens = 512, .contexts = {16}}));
    expect_refused({"--heads", "multiple of --kv-heads", "28 and 5"},
                   with({.heads = 28, .kv_heads = 5}));
    expect_refused({"--heads", "from 1 to", "got 16385"}, with({.heads = 16385}));
    expect_refused({"--kv-heads", "got 0"}, with({.kv_heads = 0}));
    expect_refused({"head_dim", "got 7"}, with({.head_dim = 7}));
    expect_refused({"--head-dim", "got 1025"}, with({.head_dim = 1025}));
    expect_refused({"--context", "got 0"}, with({.contexts = {4, 0}}));
    expect_refused(
        {"tq8 is given twice"},
        with({.formats = {{KvFormat::tq8, KvFormat::tq8}, {KvFormat::tq8, KvFormat::tq8}}}));
    expect_refused({"mlx_native5", "got 128"},
                   with({.formats = {{KvFormat::mlx_native5, KvFormat::mlx_native5}}}));
  }
}

TEST(BenchOptions, RefusesNamesAndFlagsWithoutEffect) {
  expect_refused({"on cpu", "\"atention\"; did you mean attention?"}, {.filter = "atention"});
  expect_refused({"on cuda:0", "\"atention\"; did you mean attention?"},
                 {.filter = "atention", .device = "cuda:0"});
  expect_refused({"on cuda:0", "\"runtime\""}, {.filter = "runtime", .device = "cuda:0"});
  expect_refused({"cuda:0 does not use --threads"}, {.device = "cuda:0", .threads = 0});
  expect_refused({"cuda:0 does not use --seconds"}, {.device = "cuda:0", .seconds = 0.5});
  const std::vector<std::pair<const char*, AttentionChoice>> flags = {
      {"--heads", {.heads = 8}},
      {"--kv-heads", {.kv_heads = 8}},
      {"--head-dim", {.head_dim = 64}},
      {"--tokens", {.tokens = 2}},
      {"--context", {.contexts = {64}}},
      {"--formats", {.formats = {{KvFormat::tq8, KvFormat::tq8}}}},
  };
  for (const char* device : {"cpu", "cuda:0"}) {
    for (const auto& [flag, choice] : flags) {
      expect_refused({"only attention or serving uses " + std::string(flag) + ","},
                     {.filter = "rope", .device = device, .attention = choice});
      bench::check({.filter = "att", .device = device, .attention = choice});
      bench::check({.device = device, .attention = choice});
    }
  }
  bench::check({.filter = "rope", .threads = 2, .seconds = 0.5});
  for (const char* device : {"cpu", "cuda:0"}) {
    const std::pair<const char*, bench::ServingChoice> own[] = {
        {"--batch", {.batch = 4}}, {"--page", {.page_tokens = 16}}, {"--shared", {.shared = 64}}};
    for (const auto& [flag, choice] : own) {
      expect_refused({"only serving uses " + std::string(flag) + ","},
                     {.filter = "attention", .device = device, .serving = choice});
      bench::check({.filter = "serving", .device = device, .serving = choice});
    }
    const auto refused = [&](const char* text, const bench::ServingChoice& choice,
                             const std::vector<uint64_t>& contexts) {
      expect_refused({text}, {.filter = "serving",
                              .device = device,
                              .attention = {.contexts = contexts},
                              .serving = choice});
    };
    refused("--page must be a multiple of 8, got 20", {.page_tokens = 20}, {});
    refused("--batch must be from 1 to 65536, got 0", {.batch = 0}, {});
    refused("--shared must be at most the shortest context 512, got 576", {.shared = 576}, {});
    refused("--shared must be whole pages of 64 tokens, got 100", {.shared = 100}, {4096});
    expect_refused({"--tokens must be at most the shortest context 512, got 600"},
                   {.filter = "serving", .device = device, .attention = {.tokens = 600}});
  }
}

TEST(BenchOptions, MemoryIsAskedForBeforeItIsTaken) {
  Options options{.filter = "attention", .attention = {.contexts = {2147483647}}};
  EXPECT_ERROR(out_of_memory, ("needs about", "2147483647"), bench::run(options, {}));
  EXPECT_ERROR(out_of_memory, ("needs about", "2147483647"),
               bench::check_gpu_memory(Device::open("cpu"), {{32, 8, 128, 2147483647}, {{}}}));
}

std::vector<bench::Row> measured(const AttentionRun& run) {
  std::vector<std::string> begun;
  size_t done = 0;
  const bench::Progress progress{[&](const std::string& what) { begun.push_back(what); },
                                 [&](const bench::Row&) { ++done; }};
  const bench::GpuContext gpu{Device::open("cpu"), "gpu:7", 10};
  const auto rows = bench::measure_gpu_attention(gpu, run, progress);
  EXPECT_EQ(begun.size(), 1u);
  EXPECT_EQ(done, rows.size());
  return rows;
}

std::vector<std::string> keys_of(const bench::Row& row) {
  std::vector<std::string> keys;
  for (const auto& [key, value] : row.shape) keys.push_back(key);
  return keys;
}

// The GPU's benchmark, on the device that is always there.
TEST(GpuAttention, RowsOfADecodeStep) {
  const AttentionRun run{{4, 2, 64, 50}, {{}, {KvFormat::tq8, KvFormat::tq4}}, true};
  const auto rows = measured(run);
  ASSERT_EQ(rows.size(), 2u);
  for (const bench::Row& row : rows) {
    EXPECT_EQ(row.op, "attention");
    EXPECT_EQ(row.device, "gpu:7");
    EXPECT_EQ(keys_of(row), (Lines{"heads", "kv_heads", "head_dim", "context", "k", "v", "limit_us",
                                   "nmse", "nmse_sharp"}));
    EXPECT_GT(row.median_us, 0);
    EXPECT_EQ(row.against, "f16/f16");
    EXPECT_EQ(row.against_us, rows[0].median_us);
    EXPECT_DOUBLE_EQ(row.speedup, rows[0].median_us / row.median_us);
    EXPECT_DOUBLE_EQ(std::get<double>(row.shape[6].second), static_cast<double>(row.bytes) / 1e4);
    EXPECT_LT(std::get<double>(row.shape[7].second), 1e-6);
    EXPECT_LT(std::get<double>(row.shape[8].second), 1e-6);
  }
  EXPECT_EQ(rows[0].bytes, 2u * 2 * 50 * 64 * 2);
  EXPECT_EQ(std::get<std::string>(rows[1].shape[4].second), "tq8");
  EXPECT_EQ(std::get<std::string>(rows[1].shape[5].second), "tq4");
}

TEST(GpuAttention, RowsOfAPrefillAndOfMixedFormats) {
  const AttentionRun run{
      {4, 2, 64, 40, 8}, {{KvFormat::f16, KvFormat::tq4}, {KvFormat::tq6, KvFormat::bf16}}, false};
  const auto rows = measured(run);
  ASSERT_EQ(rows.size(), 2u);
  for (const bench::Row& row : rows) {
    EXPECT_EQ(row.op, "attention prefill");
    EXPECT_EQ(keys_of(row), (Lines{"heads", "kv_heads", "head_dim", "context", "k", "v", "limit_us",
                                   "tokens", "gflops"}));
    EXPECT_EQ(row.against, "f16/tq4");
    EXPECT_DOUBLE_EQ(std::get<double>(row.shape[8].second) * row.median_us * 1e3,
                     bench::attention_flops(run.shape));
  }
}

// What fill() writes is what attention and decoded() read, whatever the pair of formats.
TEST(GpuAttention, ErrorsOfMixedFormatsAreThoseOfTheKernel) {
  const AttentionRun run{{4, 2, 64, 33},
                         {{KvFormat::f16, KvFormat::tq4},
                          {KvFormat::tq4, KvFormat::f32},
                          {KvFormat::mlx_native4, KvFormat::tq2}},
                         true};
  for (const bench::Row& row : measured(run)) {
    EXPECT_LT(std::get<double>(row.shape[7].second), 1e-6)
        << std::get<std::string>(row.shape[4].second);
    EXPECT_GE(std::get<double>(row.shape[7].second), 0);
  }
}

}  // namespace
}  // namespace gyre::test
