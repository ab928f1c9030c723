// `gyre simulate`: its clock, its traces, and what a format changes.
#include "simulate.h"

#include <sstream>

#include "expect_error.h"
#include "simulate_report.h"
#include "step_preset.h"
#include "trace_file.h"

namespace gyre::test {
namespace {

using bench::SimulateOptions;
using bench::SimulateResult;
using bench::Trace;

// Nothing runs: pages, prefixes and steps are real, times are those that are given.
SimulateOptions modelled() {
  SimulateOptions options;
  options.threads = 1;
  options.formats = {{KvFormat::f16, KvFormat::f16}};
  options.step_ms = 10;
  options.token_us = 100;
  options.kv_gbps = {100};
  return options;
}

std::vector<SimulateResult> run(const SimulateOptions& options, const Trace& trace) {
  return simulate(options, trace, [](const std::string&, double) {});
}

Trace read(const std::string& text) {
  std::istringstream in(text);
  return tools::read_trace(in, "test");
}

TEST(Simulate, TheClockCountsTheRestOfAStep) {
  const SimulateOptions options = modelled();
  const Trace trace = {{2, 0, 0, 0, 100, 3}};
  const SimulateResult result = run(options, trace)[0];
  const double token_bytes = 2.0 * 2 * 8 * 128 * 4;
  const double first = 0.010 + 100 * 100e-6 + 100 * token_bytes / 100e9;
  EXPECT_NEAR(result.wait_p50, first, 1e-6);
  // The prompt's step gives the first token; three more steps read 101, 102 and 103 keys.
  EXPECT_EQ(result.steps, 4u);
  const double rest = 3 * (0.010 + 100e-6) + (101 + 102 + 103) * token_bytes / 100e9;
  EXPECT_NEAR(result.seconds, 2 + first + rest, 1e-6);
}

// 41 requests in 97 s never met while a step took the time of the KV path alone.
TEST(Simulate, RequestsMeetWhenStepsTakeTheirTime) {
  const Trace trace = bench::make_trace({.seconds = 60, .per_second = 1, .seed = 1});
  SimulateOptions options = modelled();
  options.step_ms = 30;
  const SimulateResult slow = run(options, trace)[0];
  options.step_ms = 0.01;
  options.token_us = 0;
  const SimulateResult fast = run(options, trace)[0];
  EXPECT_GT(slow.mean_users, 3);
  EXPECT_LT(fast.mean_users, 2);
  EXPECT_GT(slow.wait_p99, 10 * fast.wait_p99);
  EXPECT_EQ(slow.finished, trace.size());
}

TEST(Simulate, TheKvPathRunsWhereNoRateIsGiven) {
  SimulateOptions options = modelled();
  options.kv_gbps.clear();
  options.heads = options.kv_heads = 1;
  options.head_dim = 16;
  options.layers = 1;
  options.memory = 1 << 20;
  const SimulateResult result = run(options, {{0, 0, 0, 64, 10, 3}, {0, 1, 0, 64, 10, 3}})[0];
  EXPECT_EQ(result.finished, 2u);
  EXPECT_GT(result.seconds, 0.010 * static_cast<double>(result.steps));
}

TEST(Simulate, PrefixesAreSharedUnlessTheyAreNot) {
  // Blocks 0 and 1 are computed once: 1024 of 1100 tokens are there, in whole pages, for the
  // second.
  const Trace trace = read(
      "{\"timestamp\": 0, \"input_length\": 1100, \"output_length\": 5, \"hash_ids\": [0, 1, 2]}\n"
      "{\"timestamp\": 9000, \"input_length\": 1100, \"output_length\": 5, "
      "\"hash_ids\": [0, 1, 3]}\n");
  SimulateOptions options = modelled();
  const SimulateResult shared = run(options, trace)[0];
  EXPECT_EQ(shared.prompt_tokens, 2200u);
  EXPECT_EQ(shared.hit_tokens, 1024u);
  options.share_prefixes = false;
  EXPECT_EQ(run(options, trace)[0].hit_tokens, 0u);
}

// Two answers that fit one by one, and not together: the second is preempted, goes on with what it
// had, and its pause is counted.
TEST(Simulate, APreemptedAnswerGoesOn) {
  const Trace trace = {{0, 0, 0, 0, 64, 400}, {0, 1, 0, 0, 64, 400}};
  SimulateOptions options = modelled();
  const uint64_t page = options.layers * kv_page_bytes({.k = options.formats[0].k,
                                                        .v = options.formats[0].v,
                                                        .kv_heads = options.kv_heads,
                                                        .head_dim = options.head_dim,
                                                        .page_tokens = options.page_tokens});
  options.memory = 600 / options.page_tokens * page;
  const SimulateResult result = run(options, trace)[0];
  EXPECT_EQ(result.finished, 2u);
  EXPECT_EQ(result.preemptions, 1u);
  EXPECT_EQ(result.answer_tokens, 800u);
  // Both have 192 tokens when the pages end. The first goes on, then the second: not from its
  // start.
  EXPECT_NEAR(static_cast<double>(result.steps), 192 + 208 + 208, 5);
  EXPECT_GT(result.pause_p99, 100 * options.step_ms * 1e-3);
  EXPECT_LT(result.wait_p99, 0.1);
  double longest = 0;
  for (const bench::SimulateSample& sample : result.samples)
    longest = std::max(longest, sample.pause);
  EXPECT_DOUBLE_EQ(longest, result.pause_p99);
  options.memory *= 2;
  const SimulateResult ample = run(options, trace)[0];
  EXPECT_EQ(ample.preemptions, 0u);
  EXPECT_LT(ample.pause_p99, 2 * (options.step_ms + 1) * 1e-3);
}

// 1,000 requests of agents in Mooncake's format, more than any of the pools can take at once.
TEST(Simulate, FourBitsHoldMoreUsersInTheSameMemory) {
  Trace made = bench::make_trace(
      {.load = bench::TraceLoad::agent, .seconds = 60, .per_second = 20, .systems = 200});
  made.resize(1000);
  std::ostringstream text;
  tools::write_mooncake_trace(text, made);
  const Trace trace = read(text.str());
  ASSERT_EQ(trace.size(), 1000u);
  const bench::StepPreset& preset = bench::step_preset("llama-3.1-8b@h200");
  SimulateOptions options = modelled();
  options.layers = 32;
  options.memory = uint64_t{8} << 30;
  options.users = 2048;
  options.step_tokens = 8192;
  options.step_ms = preset.step_ms;
  options.token_us = preset.token_us;
  options.formats = {{KvFormat::f16, KvFormat::f16}, {KvFormat::tq4, KvFormat::tq4}};
  options.kv_gbps.clear();
  for (const bench::FormatPair& formats : options.formats)
    options.kv_gbps.push_back(bench::kv_gbps(preset, formats));
  EXPECT_EQ(options.kv_gbps, (std::vector<double>{4200, 3000}));
  const std::vector<SimulateResult> results = run(options, trace);
  for (const SimulateResult& result : results) {
    EXPECT_EQ(result.finished, 1000u);
    EXPECT_TRUE(result.was_full());
    EXPECT_GT(result.wait_p50, 0);
    EXPECT_GE(result.wait_p99, result.wait_p50);
    double longest = 0;
    for (const bench::SimulateSample& sample : result.samples)
      longest = std::max(longest, sample.wait);
    EXPECT_GE(longest, result.wait_p50);
  }
  EXPECT_GE(results[1].held_users, 3.5 * results[0].held_users);
  EXPECT_LT(results[1].wait_p50, results[0].wait_p50);
  const std::string page = tools::simulate_html(options, trace, results, "machine", {});
  for (const char* const part :
       {"wait p50 s", "p99 s", "users held", "Hit rate so far", "Evictions so far",
        "Users served over time", "Longest wait of the answers"})
    EXPECT_NE(page.find(part), std::string::npos) << part;
}

TEST(Simulate, BlocksSayWhatConversationsSay) {
  const Trace trace = bench::make_trace({.load = bench::TraceLoad::agent, .seconds = 10});
  const Trace blocks = bench::in_blocks(trace);
  ASSERT_EQ(blocks.size(), trace.size());
  EXPECT_EQ(bench::longest_request(blocks), bench::longest_request(trace));
  // A conversation's next prompt begins with the whole blocks of the one before.
  const bench::TraceRequest &first = blocks[0], *next = nullptr;
  for (size_t i = 1; i < trace.size() && next == nullptr; ++i)
    if (trace[i].conversation == trace[0].conversation) next = &blocks[i];
  ASSERT_NE(next, nullptr);
  const uint64_t whole = first.user_tokens / bench::kTraceBlockTokens;
  EXPECT_TRUE(std::equal(first.blocks.begin(), first.blocks.begin() + static_cast<ptrdiff_t>(whole),
                         next->blocks.begin()));
  EXPECT_GT(whole, 15u);
}

TEST(Simulate, BadTracesAreRefused) {
  const auto fails = [](const std::vector<std::string>& parts, const std::string& text) {
    EXPECT_TRUE(refused(parts, [&] { read(text); })) << text.substr(0, 200);
  };
  const auto own = [](const std::string& user, const std::string& at = "1",
                      const std::string& more = "") {
    return "{\"at\": " + at +
           ", \"conversation\": 0, \"system\": 0, \"system_tokens\": 8, \"user_tokens\": " + user +
           ", \"answer_tokens\": 1" + more + "}\n";
  };
  EXPECT_EQ(read(own("5")).size(), 1u);
  const std::string count = "\"user_tokens\" must be a whole number from 1 to 16777216, got ";
  fails({"line 1 of test", count + "-5"}, own("-5"));
  fails({count + "1.5"}, own("1.5"));
  fails({count + "1e+30"}, own("1e30"));
  fails({count + "0"}, own("0"));
  fails({count + "99999999999"}, own("99999999999"));
  fails({count + "\"5\""}, own("\"5\""));
  fails({"\"at\" must be a number from 0 to 1e+07, got 1e+300"}, own("5", "1e300"));
  fails({"\"at\" must be a number from 0", "got -1"}, own("5", "-1"));
  fails({"unknown key \"colour\""}, own("5", "1", ", \"colour\": 3"));
  fails({"\"at\" is there twice"}, own("5", "1", ", \"at\": 1"));
  fails({count + "\"" + std::string(39, 'x') + "..."}, own("\"" + std::string(1000, 'x') + "\""));
  // So deep that a recursion into it would exceed the stack.
  const std::string deep = std::string(1000000, '[') + std::string(1000000, ']');
  fails({count + "a list"}, own(deep));
  fails({"unknown key \"deep\""}, own("5", "1", ", \"deep\": " + deep));
  fails({"has no \"answer_tokens\""},
        "{\"at\": 1, \"conversation\": 0, \"system\": 0, "
        "\"system_tokens\": 8, \"user_tokens\": 5}");
  fails({"line 2 of test is earlier"}, own("5", "2") + own("5", "1"));
  fails({"line 3 of test changes the system prompt of conversation 0 from 0 (8 tokens) to 1"},
        own("5") + "\n" +
            "{\"at\": 2, \"conversation\": 0, \"system\": 1, \"system_tokens\": 8, "
            "\"user_tokens\": 5, \"answer_tokens\": 1}");
  const auto mooncake = [](const std::string& length, const std::string& blocks) {
    return "{\"timestamp\": 5, \"input_length\": " + length +
           ", \"output_length\": 2, \"hash_ids\": " + blocks + "}\n";
  };
  EXPECT_EQ(read(mooncake("513", "[7, 9]"))[0].blocks, (std::vector<uint64_t>{7, 9}));
  EXPECT_EQ(read(mooncake("513", "[7, 9]"))[0].at, 0.005);
  fails({"\"hash_ids\" must have 2 blocks of 512 tokens, got 1"}, mooncake("513", "[7]"));
  fails({"each of \"hash_ids\" must be a whole number", "got -9"}, mooncake("513", "[7, -9]"));
  fails({"\"hash_ids\" must be a list"}, mooncake("513", "7"));
  fails({"\"input_length\" must be a whole number from 1"}, mooncake("-1", "[]"));
  EXPECT_EQ(read(mooncake("513", "[7, 18446744073709551615]"))[0].blocks[1], ~uint64_t{0});
  fails({"each of \"hash_ids\"", "got 1.8446744073709552e+19"},
        mooncake("513", "[7, 18446744073709551616]"));
  fails({"line 2 of test has no \"timestamp\""}, mooncake("5", "[1]") + own("5"));
  fails({"line 1 of test has neither \"at\"", "nor \"timestamp\", as Mooncake's"}, "{}");
  fails({"is not a JSON object"}, "[1]");
  fails({"line 1 of test is not a JSON object"}, "{\"at\": }");
  fails({"line 1 of test has a number that is too large"}, own("5", "1e9999"));
  fails({"has no requests"}, "\n");
  std::string none = own("5");
  none.replace(none.find("\"system\": 0"), 11, "\"system\": -0");
  EXPECT_EQ(read(none)[0].system, 0u);
  std::istringstream folder(own("5"));
  folder.setstate(std::ios::badbit);
  EXPECT_TRUE(throws_error(ErrorCode::io, {"trace: a folder cannot be read"},
                           [&] { tools::read_trace(folder, "a folder"); }));
  EXPECT_TRUE(refused({"10000 conversations a second for 86400 s are 8.64e+08, at most 1e+06"},
                      [&] { bench::make_trace({.seconds = 86400, .per_second = 10000}); }));
}

TEST(Simulate, OptionsAreRefusedByTheNamesOfTheCommand) {
  const auto fails = [](const std::vector<std::string>& parts, const auto& change) {
    SimulateOptions options = modelled();
    change(options);
    EXPECT_TRUE(refused(parts, [&] { bench::check(options); }));
  };
  fails({"--page must be a multiple of 8 from 8 to 1024, got 12"},
        [](SimulateOptions& o) { o.page_tokens = 12; });
  fails({"--kv-gbps must be from 0.001", "got 1e-300"},
        [](SimulateOptions& o) { o.kv_gbps = {1e-300}; });
  fails({"--kv-gbps must have one number, or one for each of 1 formats, got 2"},
        [](SimulateOptions& o) {
          o.formats.resize(1);
          o.kv_gbps = {1, 2};
        });
  fails({"--memory of 0 MiB holds no page: 64 tokens of 4 layers in f16 have 1048576 bytes"},
        [](SimulateOptions& o) { o.memory = 1000; });
  fails({"--memory of 1073741824 MiB holds 1073741824 pages", "at most 33554431"},
        [](SimulateOptions& o) { o.memory = uint64_t{1} << 50; });
}

}  // namespace
}  // namespace gyre::test
