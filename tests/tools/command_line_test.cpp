// The gyre tool as people and scripts use it: exit status, what it says and where, valid JSON.
#include <sys/wait.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "gyre_test.h"

namespace {

struct Outcome {
  int status = -1;
  std::string out, error;
};

std::string text_of(const std::filesystem::path& path) {
  std::ostringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

// `arguments` is what a shell would get.
Outcome gyre(const std::string& arguments, const std::string& out_file = {}) {
  const std::string place =
      testing::TempDir() + testing::UnitTest::GetInstance()->current_test_info()->name();
  const std::string out = out_file.empty() ? place + ".out" : out_file, error = place + ".err";
  const std::string line = GYRE_TOOL " " + arguments + " >" + out + " 2>" + error;
  const int status = std::system(line.c_str());
  return {WIFEXITED(status) ? WEXITSTATUS(status) : -1,
          out_file.empty() ? text_of(out) : std::string(), text_of(error)};
}

// Nothing on standard output, the message on the other.
void fails(int status, const std::string& arguments, const std::vector<std::string>& parts) {
  const Outcome got = gyre(arguments);
  EXPECT_EQ(got.status, status) << arguments << "\n" << got.error;
  EXPECT_EQ(got.out, "") << arguments;
  EXPECT_TRUE(got.error.starts_with("gyre: ")) << got.error;
  EXPECT_EQ(got.error.find("See `gyre") != std::string::npos, status == 2) << got.error;
  for (const std::string& part : parts)
    EXPECT_NE(got.error.find(part), std::string::npos)
        << arguments << ": no \"" << part << "\" in\n"
        << got.error;
}

// One object a line.
std::vector<nlohmann::json> objects(const std::string& text) {
  std::vector<nlohmann::json> all;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    all.push_back(nlohmann::json::parse(line));
    EXPECT_TRUE(all.back().is_object()) << line;
  }
  return all;
}

const std::string kSmall = " --heads 4 --kv-heads 2 --head-dim 64 --seconds 0.001 --threads 1 ";

TEST(CommandLine, Version) {
  const Outcome got = gyre("--version");
  EXPECT_EQ(got.status, 0);
  EXPECT_TRUE(got.out.starts_with("gyre " GYRE_VERSION "\n")) << got.out;
  for (const char* part : {"built by ", "SIMD targets: "})
    EXPECT_NE(got.out.find(part), std::string::npos) << got.out;
  EXPECT_EQ(got.error, "");
}

TEST(CommandLine, HelpSaysWhatTheExitStatusMeans) {
  for (const char* arguments :
       {"--help", "--help-all", "bench --help", "compare --help", "devices --help",
        "kernels --help", "inspect --help", "prepare --help"}) {
    const Outcome got = gyre(arguments);
    EXPECT_EQ(got.status, 0) << arguments;
    EXPECT_EQ(got.error, "");
    for (const char* part : {"Exit status: 0 done; 1 what was asked for failed", "32k"})
      EXPECT_NE(got.out.find(part), std::string::npos) << arguments;
  }
}

TEST(CommandLine, WrongUsageIsTwo) {
  fails(2, "", {"subcommand is required"});
  fails(2, "comapre", {"no command \"comapre\"; did you mean compare?", "kernels"});
  fails(2, "frobnicate", {"no command \"frobnicate\"; there are compare"});
  fails(2, "bench --contxt 5", {"no option \"--contxt\"; did you mean --context?"});
  fails(2, "bench --contxt=5", {"no option \"--contxt\"; did you mean --context?"});
  fails(2, "devices --xyzzy", {"no option \"--xyzzy\"\n"});
  fails(2, "bench rope attention", {"unexpected argument \"attention\""});
  fails(2, "bench atention", {"did you mean attention?"});
  fails(2, "compare lama-3.1-8b", {"no preset \"lama-3.1-8b\"; did you mean llama-3.1-8b?"});
  fails(2, "compare --formats tq44", {"--formats", "\"tq44\"; did you mean tq4?"});
  fails(2, "compare --tail 2k --context 1k", {"a tail", "1024", "got 2048"});
  fails(2, "compare --tail 8 --formats f16,f32", {"a tail of 8", "no format is compressed"});
  fails(2, "compare --list --context 1k", {"--list excludes --context"});
  fails(2, "bench --formats tq8,", {"--formats", "\"tq8,\""});
  fails(2, "inspect", {"file is required"});
  fails(2, "kernels --device cud", {"no backend", "\"cud\""});
  fails(2, "bench attention --context 16 --tokens 512", {"--tokens", "512 and 16"});
  fails(2, "bench rope --context 16", {"only attention or serving uses --context"});
  fails(2, "bench attention --batch 4", {"only serving uses --batch"});
  fails(2, "simulate --users 300 --step 256", {"--users must be at most --step", "300 and 256"});
  fails(2, "simulate --memory 1 --layers 1024", {"--memory of 1 MiB holds no page", "in f16"});
  fails(2, "simulate --load batch", {"--load: must be chat or agent, got \"batch\""});
  fails(1, "simulate --trace none.jsonl", {"cannot read \"none.jsonl\": No such file"});
  fails(1, "simulate --trace /", {"trace: / cannot be read"});
  fails(2, "simulate --trace a.jsonl --rate 2", {"--trace excludes --rate"});
  fails(2, "simulate --trace ''", {"--trace", "needs the path of a file"});
  fails(2, "simulate --preset llama", {"no step preset \"llama\""});
  fails(2, "bench attention --device cuda:0 --threads 2", {"cuda:0 does not use --threads"});
  fails(2, "compare --device cuda:0 --threads 2", {"cuda:0 does not use --threads"});
}

TEST(CommandLine, NumbersAreRefusedAsTyped) {
  for (const char* option : {"compare --context", "compare --heads", "compare --layers",
                             "compare --tail", "bench --context", "bench --tokens", "bench --heads",
                             "bench --kv-heads", "bench --head-dim", "bench --threads"}) {
    const std::string flag = std::string(option).substr(std::string(option).find("--"));
    for (const char* value : {"-5", "abc", "99999999999999999999", "1.5k", "4G"}) {
      fails(2, option + std::string(" ") + value,
            {flag + ": must be a whole number", "got \"" + std::string(value) + "\""});
    }
  }
  fails(2, "compare --context 1k,-2k", {"got \"-2k\""});
  fails(2, "compare --context 1k,,2k", {"got \"1k,,2k\""});
  for (const char* value : {"0", "nan", "-1", "1h"})
    fails(2, "bench --seconds " + std::string(value), {"--seconds", "got \"" + std::string(value)});
}

TEST(CommandLine, FailureIsOne) {
  fails(1, "kernels --device metal", {"metal", "(unsupported)"});
  fails(1, "bench attention --device metal", {"metal", "(unsupported)"});
  fails(1, "compare --device metal", {"metal", "(unsupported)"});
  fails(1, "kernels --device cuda:1000000", {"cuda:1000000", "(unsupported)"});
  fails(1, "inspect /nowhere/at.all", {"/nowhere/at.all", "(io)"});
  fails(1, "compare --html /nowhere/report.html", {"/nowhere/report.html", "(io)"});
  fails(1, "compare --context 2047M", {"needs about", "(out_of_memory)"});
  fails(1, "bench attention --context 2047M", {"needs about", "(out_of_memory)"});
}

TEST(CommandLine, OutputThatCannotBeWrittenIsAFailure) {
  if (!std::filesystem::exists("/dev/full")) GTEST_SKIP() << "there is no /dev/full";
  const Outcome got = gyre("devices", "/dev/full");
  EXPECT_EQ(got.status, 1);
  EXPECT_NE(got.error.find("standard output"), std::string::npos) << got.error;
}

TEST(CommandLine, DevicesInJson) {
  const Outcome got = gyre("devices --json");
  EXPECT_EQ(got.status, 0);
  const auto all = objects(got.out);
  ASSERT_GE(all.size(), 3u);
  EXPECT_EQ(all[0]["name"], "cpu");
  for (const nlohmann::json& device : all) {
    EXPECT_FALSE(device["name"].get<std::string>().empty());
    if (device["available"].get<bool>()) {
      EXPECT_GT(device["compute_units"], 0);
      EXPECT_GT(device["memory_bytes"], 1 << 20);
      EXPECT_FALSE(device["description"].get<std::string>().empty());
    } else {
      EXPECT_FALSE(device["reason"].get<std::string>().empty());
    }
  }
}

TEST(CommandLine, BenchTakesItsFlagsInJson) {
  const Outcome got =
      gyre("bench attention --context 1k,96" + kSmall + "--formats tq8,f16/tq4 --json");
  EXPECT_EQ(got.status, 0) << got.error;
  const auto rows = objects(got.out);
  ASSERT_EQ(rows.size(), 4u);
  for (size_t i = 0; i < rows.size(); ++i) {
    EXPECT_EQ(rows[i]["context"], i < 2 ? 1024 : 96);
    EXPECT_EQ(rows[i]["heads"], 4);
    EXPECT_EQ(rows[i]["kv_heads"], 2);
    EXPECT_EQ(rows[i]["head_dim"], 64);
    EXPECT_EQ(rows[i]["threads"], 1);
    EXPECT_EQ(rows[i]["k"], i % 2 == 0 ? "tq8" : "f16");
    EXPECT_EQ(rows[i]["v"], i % 2 == 0 ? "tq8" : "tq4");
    EXPECT_EQ(rows[i]["against"], "tq8/tq8");
  }
  const auto prefill = objects(
      gyre("bench attention --tokens 16 --context 16" + kSmall + "--formats f16 --json").out);
  ASSERT_EQ(prefill.size(), 1u);
  EXPECT_EQ(prefill[0]["op"], "attention prefill");
  EXPECT_EQ(prefill[0]["tokens"], 16);
  EXPECT_GT(prefill[0]["gflops"], 0);
}

TEST(CommandLine, CompareTakesFormatsAndATail) {
  const std::string arguments =
      "compare --layers 3 --context 64,1k --formats f16,tq8/tq4 --tail 32" + kSmall;
  const Outcome got = gyre(arguments + "--json");
  EXPECT_EQ(got.status, 0) << got.error;
  EXPECT_NE(got.error.find("tq8/tq4: filling 1024 tokens"), std::string::npos) << got.error;
  const auto rows = objects(got.out);
  ASSERT_EQ(rows.size(), 4u);
  for (size_t i = 0; i < rows.size(); ++i) {
    EXPECT_EQ(rows[i]["context"], i < 2 ? 64 : 1024);
    EXPECT_EQ(rows[i]["k"], i % 2 == 0 ? "f16" : "tq8");
    EXPECT_EQ(rows[i]["v"], i % 2 == 0 ? "f16" : "tq4");
    EXPECT_EQ(rows[i]["tail"], i % 2 == 0 ? 0 : 32);
    EXPECT_FALSE(rows[i].contains("window_step_us"));
    EXPECT_DOUBLE_EQ(rows[i]["model_step_us"], 3 * rows[i]["step_us"].get<double>());
    EXPECT_NEAR(rows[i]["tokens_per_second"].get<double>() * rows[i]["model_step_us"].get<double>(),
                1e6, 1);
  }
  const Outcome table = gyre(arguments);
  EXPECT_EQ(table.status, 0) << table.error;
  for (const char* part : {"  tok/s  ", "newest 32 tokens in f16", "matrix products"})
    EXPECT_NE(table.out.find(part), std::string::npos) << table.out;
}

// What a user sees first: pools that are full, and more users in fewer bits.
TEST(CommandLine, SimulateAnswersWithoutFlags) {
  const auto rows = objects(gyre("simulate --json").out);
  ASSERT_EQ(rows.size(), 2u);
  for (const nlohmann::json& row : rows) {
    EXPECT_EQ(row["requests"], 1000);
    EXPECT_GT(row["full_part"], 0.9);
    EXPECT_GT(row["wait_p50_seconds"], 1);
  }
  EXPECT_GT(rows[1]["users_held"], 3 * rows[0]["users_held"].get<double>());
  // What runs for real is small.
  const auto real =
      objects(gyre("simulate --threads 1 --layers 1 --memory 64 --heads 2 --kv-heads 2"
                   " --head-dim 64 --formats tq4 --rate 5 --trace-seconds 2 --json")
                  .out);
  ASSERT_EQ(real.size(), 1u);
  EXPECT_LT(real[0]["requests"], 100);
  EXPECT_EQ(real[0]["finished"], real[0]["requests"]);
}

TEST(CommandLine, CompareListsItsPresets) {
  const Outcome got = gyre("compare --list");
  EXPECT_EQ(got.status, 0);
  EXPECT_NE(got.out.find("llama-3.1-8b"), std::string::npos) << got.out;
}

}  // namespace
