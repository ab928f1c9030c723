#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <stdexcept>
#include <tuple>

#include "device_setups.h"
#include "gyre_test.h"
#include "op_case.h"
#include "tested_op.h"
#include "variant_classes.h"

namespace gyre::test {
namespace {

std::vector<Refusal> no_refusals() { return {}; }  // KvCache refuses, before it records

[[maybe_unused]] const TestedOp kOps[] = {
    {"kv_copy", kv_copy_cases, kv_copy_refusals},
    {"rope", rope_cases, rope_refusals},
    {"norm_rope", norm_rope_cases, norm_rope_refusals},
    {"hadamard", hadamard_cases, hadamard_refusals},
    {"kv_quantize", kv_quantize_cases, kv_quantize_refusals},
    {"kv_calibrated", kv_calibrated_cases, kv_calibrated_refusals},
    {"kv_transform", kv_transform_cases, kv_transform_refusals},
    {"kv_dequantize", kv_dequantize_cases, kv_dequantize_refusals},
    {"kv_write", kv_write_cases, kv_write_refusals},
    {"rope_append", rope_append_cases, rope_append_refusals},
    {"kv_page_copy", kv_page_copy_cases, kv_page_copy_refusals},
    {"attention", attention_cases, attention_refusals},
    {"paged_attention", paged_attention_cases, paged_attention_refusals},
    {"attention_partial", attention_partial_cases, attention_partial_refusals},
    {"attention_merge", attention_merge_cases, attention_merge_refusals},
    {"kv_cache", kv_cache_cases, no_refusals},
};

}  // namespace

std::vector<OpCases> all_ops() { return TestedOp::all(); }

namespace {

// GYRE_CASES=2/14 takes every 14th case from the third on, for running several processes side by
// side where building kernels takes longest. Each next setup of a device begins one case earlier:
// setups together take more cases than each of them.
struct Part {
  size_t index = 0, count = 1;
  bool takes(size_t number, const DeviceSetup& setup) const {
    return (number + setup.number) % count == index;
  }
};
Part my_part() {
  const char* const text = std::getenv("GYRE_CASES");
  if (text == nullptr) return {};
  char* end = nullptr;
  Part part;
  part.index = std::strtoul(text, &end, 10);
  part.count = *end == '/' ? std::strtoul(end + 1, nullptr, 10) : 0;
  if (part.index >= part.count)
    throw std::invalid_argument("GYRE_CASES must be PART/PARTS, from 0");
  return part;
}

// GYRE_CASE_LIST=FILE takes the cases that are lines of the file, as Launched writes them.
const std::set<std::string>* chosen_cases() {
  static const auto kNames = []() -> std::optional<std::set<std::string>> {
    const char* const path = std::getenv("GYRE_CASE_LIST");
    if (path == nullptr) return {};
    std::ifstream in(path);
    if (!in) throw std::invalid_argument(std::string("GYRE_CASE_LIST: cannot read ") + path);
    std::set<std::string> names;
    for (std::string line; std::getline(in, line);) names.insert(line);
    return names;
  }();
  return kNames ? &*kNames : nullptr;
}

struct NumberedCase {
  std::string id;  // "attention#12 <name>": names alone are not unique
  OpCase op_case;
};

// The cases of an op that GYRE_CASE_LIST leaves.
std::vector<NumberedCase> listed_cases(const OpCases& op) {
  std::vector<NumberedCase> listed;
  size_t number = 0;
  for (OpCase& op_case : op.cases()) {
    const std::string id = op.op + "#" + std::to_string(number++) + " " + op_case.name;
    if (chosen_cases() != nullptr && chosen_cases()->count(id) == 0) continue;
    listed.push_back({id, std::move(op_case)});
  }
  return listed;
}

uint64_t bytes_of(const OpRun& run) {
  uint64_t bytes = 0;
  for (const Block& block : run.blocks)
    bytes += block.before.size() + block.after.size() + block.near.size() * sizeof(Near);
  return bytes;
}

// As listed_cases(). Making a case takes longer than running it: what one setup made, the next ones
// copy, as far as memory goes.
const std::vector<NumberedCase>& kept_cases(const OpCases& op) {
  constexpr uint64_t kMaxBytes = uint64_t{1} << 30;
  static std::string kept_op;
  static std::vector<NumberedCase> kept;
  if (kept_op == op.op) return kept;
  kept = listed_cases(op);
  kept_op = op.op;
  const auto left = std::make_shared<uint64_t>(kMaxBytes);
  for (NumberedCase& each : kept) {
    const auto run = std::make_shared<std::optional<OpRun>>();
    each.op_case.make = [make = each.op_case.make, run, left]() -> OpRun {
      if (*run) return **run;
      OpRun made = make();
      if (const uint64_t bytes = bytes_of(made); bytes <= *left) {
        *left -= bytes;
        *run = made;
      }
      return made;
    };
  }
  return kept;
}

// Which classes of variants the cases of a setup launched. GYRE_LAUNCHED=FOLDER also writes each
// with the case that launched it and the bytes it takes, and counts what other processes wrote
// there.
class Launched {
 public:
  void add(const std::string& setup, const std::string& id, const CaseReport& report) {
    std::set<std::string>& all = of_[setup];
    for (const std::string& text : report.classes) {
      all.insert(text);
      if (folder() != nullptr) file(setup) << text << '\t' << report.bytes << '\t' << id << '\n';
    }
  }
  void finish(const std::string& setup, const std::string& op) { ops_[setup].insert(op); }

  // None: some cases have not run, here or elsewhere.
  std::optional<std::set<std::string>> all(const std::string& setup) {
    if (folder() != nullptr) return written(setup);
    const bool whole = my_part().count == 1 && chosen_cases() == nullptr;
    if (!whole || ops_[setup].size() != all_ops().size()) return {};
    return of_[setup];
  }

 private:
  static const char* folder() { return std::getenv("GYRE_LAUNCHED"); }

  std::ofstream& file(const std::string& setup) {
    std::ofstream& out = files_[setup];
    if (!out.is_open())
      out.open(std::filesystem::path(folder()) / (setup + "." + std::to_string(getpid())));
    return out;
  }
  std::set<std::string> written(const std::string& setup) {
    files_.clear();
    std::set<std::string> all;
    for (const auto& entry : std::filesystem::directory_iterator(folder())) {
      if (!entry.path().filename().string().starts_with(setup + ".")) continue;
      std::ifstream in(entry.path());
      for (std::string line; std::getline(in, line);) all.insert(line.substr(0, line.find('\t')));
    }
    return all;
  }

  std::map<std::string, std::set<std::string>> of_, ops_;
  std::map<std::string, std::ofstream> files_;
};

Launched& launched() {
  static Launched all;
  return all;
}

class Ops : public testing::TestWithParam<std::tuple<OpCases, DeviceSetup>> {
 protected:
  const OpCases& op() const { return std::get<0>(GetParam()); }
  const DeviceSetup& setup() const { return std::get<1>(GetParam()); }
};

// The largest error of each arithmetic.
class Errors {
 public:
  void add(const CaseReport& report) {
    CaseReport& worst = worst_[report.arithmetic];
    if (report.nmse / report.nmse_bound > worst.nmse / worst.nmse_bound || worst.nmse == 0)
      worst = report;
  }
  void print() const {
    for (const auto& [name, report] : worst_) {
      if (report.nmse_bound != 0)
        std::cout << "NMSE of " << name << ": " << report.nmse << ", bound " << report.nmse_bound
                  << '\n';
    }
  }

 private:
  std::map<std::string, CaseReport> worst_;
};

TEST_P(Ops, MatchTheReference) {
  const OpenDevice open(setup());
  uint32_t unsupported = 0;
  Errors errors;
  size_t number = 0;
  for (const auto& [id, op_case] : kept_cases(op())) {
    if (!my_part().takes(number++, setup())) continue;
    if (!op_case.only_with.empty() && !has_kernel(open.device(), op_case.only_with)) {
      std::cout << "skipped, for devices with " << op_case.only_with << ": " << op_case.name
                << '\n';
      continue;
    }
    if (!op_case.supported(open.device())) {
      ++unsupported;
      std::cout << "skipped, not supported: " << op_case.name << '\n';
      continue;
    }
    if (const auto missing = missing_kernel(open.device(), op_case); !missing.empty()) {
      std::cout << "skipped, " << missing << " is not emulated: " << op_case.name << '\n';
      continue;
    }
    CaseReport report;
    EXPECT_TRUE(check_case(open.device(), op_case, &report));
    errors.add(report);
    launched().add(setup().name, id, report);
  }
  errors.print();
  launched().finish(setup().name, op().op);
  if (setup().device == "cpu") {
    EXPECT_EQ(unsupported, 0u) << "the CPU runs every op";
    if (setup().simd_target != 0) {
      EXPECT_NE(open.device().info().description.find(setup().simd_name), std::string::npos)
          << open.device().info().description;
    }
    EXPECT_EQ(open.device().info().compute_units, setup().threads);
  }
}

TEST_P(Ops, RefuseWhatTheyCannotDo) {
  const OpenDevice open(setup());
  const std::vector<OpCase> cases = op().cases();
  if (std::none_of(cases.begin(), cases.end(),
                   [&](const OpCase& c) { return c.supported(open.device()); }))
    GTEST_SKIP() << open.device().info().name << " does not have " << op().op;
  for (const Refusal& refusal : op().refusals()) EXPECT_TRUE(check_refusal(open.device(), refusal));
}

INSTANTIATE_TEST_SUITE_P(All, Ops,
                         testing::Combine(testing::ValuesIn(all_ops()),
                                          testing::ValuesIn(device_setups())),
                         [](const auto& test) {
                           return std::get<0>(test.param).op + "_" + std::get<1>(test.param).name;
                         });

// After all of the above: no variant that a device has is left out.
class Variants : public testing::TestWithParam<DeviceSetup> {};

TEST_P(Variants, EachClassIsLaunchedByACase) {
  const std::optional<std::set<std::string>> seen = launched().all(GetParam().name);
  if (!seen) GTEST_SKIP() << "only some of the cases ran; see GYRE_LAUNCHED";
  const OpenDevice open(GetParam());
  const std::set<std::string> listed = listed_classes(open.device());
  EXPECT_TRUE(each_is_launched(listed, *seen));
  std::cout << listed.size() << " classes of variants\n";
}

INSTANTIATE_TEST_SUITE_P(All, Variants, testing::ValuesIn(device_setups()),
                         [](const auto& test) { return test.param.name; });

// The checks themselves: each of these runs is wrong in one place.

Bytes ones(uint64_t count) { return Bytes(count, std::byte{1}); }

OpCase copy_case(const std::function<void(OpRun&)>& spoil) {
  OpCase op_case;
  op_case.name = "copy";
  op_case.make = [spoil] {
    OpRun run;
    run.blocks = {{DType::f32, ones(16), ones(16)}, {DType::f32, Bytes(16), ones(16)}};
    run.record = [](Encoder& encoder, std::span<const Tensor> t) {
      kv_copy(encoder, {.k = t[0].reshape({1, 1, 4}), .k_cache = t[1].reshape({1, 1, 4})});
    };
    spoil(run);
    return run;
  };
  return op_case;
}

TEST(CheckCase, AcceptsTheRightRun) {
  EXPECT_TRUE(check_case(Device::open("cpu"), copy_case([](OpRun&) {})));
}

TEST(CheckCase, SeesOneWrongBit) {
  const OpCase wrong = copy_case([](OpRun& run) { run.blocks[1].after[15] = std::byte{3}; });
  EXPECT_FALSE(check_case(Device::open("cpu"), wrong));
}

TEST(CheckCase, SeesAChangedInput) {
  const OpCase wrong = copy_case([](OpRun& run) { run.blocks[0].after[0] = std::byte{0}; });
  EXPECT_FALSE(check_case(Device::open("cpu"), wrong));
}

TEST(CheckCase, SeesAWrittenGuard) {
  const OpCase wrong = copy_case([](OpRun& run) {
    run.record = [](Encoder& encoder, std::span<const Tensor> t) {
      // The block is wrapped anew, four bytes further on.
      auto* memory = static_cast<float*>(t[1].data<float>().data());
      const Tensor shifted = encoder.device().wrap(memory + 1, DType::f32, {1, 1, 4});
      kv_copy(encoder, {.k = t[0].reshape({1, 1, 4}), .k_cache = shifted});
    };
    run.blocks[1].after = ones(16);
    std::fill_n(run.blocks[1].before.begin(), 4, std::byte{1});
  });
  EXPECT_FALSE(check_case(Device::open("cpu"), wrong));
}

TEST(CheckCase, CountsCommands) {
  EXPECT_FALSE(check_case(Device::open("cpu"), copy_case([](OpRun& run) { run.commands = 2; })));
}

TEST(CheckCase, HoldsTheBound) {
  const auto with_bound = [](double bound) {
    return copy_case([bound](OpRun& run) {
      const float one = 1.0f, near = 1.001f;
      for (Block& block : run.blocks) {
        for (int i = 0; i < 4; ++i)
          std::memcpy(&block.after[i * sizeof(float)], &one, sizeof(float));
      }
      run.blocks[0].before = run.blocks[0].after;
      std::memcpy(&run.blocks[1].after[4], &near, sizeof(float));
      run.blocks[1].bound = bound;
    });
  };
  EXPECT_TRUE(check_case(Device::open("cpu"), with_bound(0.002)));
  EXPECT_FALSE(check_case(Device::open("cpu"), with_bound(0.0005)));
  EXPECT_FALSE(check_case(Device::open("cpu"), with_bound(0)));
}

TEST(CheckVariants, SeesWhatIsMissingAndWhatIsNotListed) {
  const Device device = Device::open("cpu");
  const std::set<std::string> listed = listed_classes(device);
  EXPECT_TRUE(each_is_launched(listed, listed));
  for (const std::string& text : listed) {
    std::set<std::string> some = listed;
    some.erase(text);
    EXPECT_FALSE(each_is_launched(listed, some)) << text;
    EXPECT_FALSE(each_is_launched(some, listed)) << text;
  }
  EXPECT_EQ(listed.count("attention k=levels v=f16 reduction=states"), 1u);
  EXPECT_EQ(listed.count("kv_quantize v=mlx_native8"), 1u);
}

TEST(CheckVariants, CountsWhatCasesRecord) {
  const Device device = Device::open("cpu");
  CaseReport report;
  EXPECT_TRUE(check_case(device, copy_case([](OpRun&) {}), &report));
  EXPECT_EQ(report.classes, std::vector<std::string>{"kv_copy source=f32 cache=f32"});
  EXPECT_FALSE(
      each_is_launched(listed_classes(device), {report.classes.begin(), report.classes.end()}));
}

TEST(CheckRefusal, SeesAcceptanceWrongTextAndWrites) {
  const Device device = Device::open("cpu");
  const auto undefined = [](Encoder& encoder, FilledTensors&) { kv_copy(encoder, {}); };
  EXPECT_TRUE(check_refusal(device, {"", {"kv_copy"}, undefined}));
  EXPECT_FALSE(check_refusal(device, {"", {"rope"}, undefined}));
  EXPECT_FALSE(check_refusal(device, {"", {"kv_copy"}, undefined, ErrorCode::unsupported}));
  EXPECT_FALSE(check_refusal(device, {"", {}, [](Encoder&, FilledTensors&) {}}));
  EXPECT_FALSE(check_refusal(device, {"", {}, [&](Encoder& encoder, FilledTensors& tensors) {
                                        tensors.make(DType::u8, {3}).data<uint8_t>()[2] = 0;
                                        undefined(encoder, tensors);
                                      }}));
}

}  // namespace
}  // namespace gyre::test
