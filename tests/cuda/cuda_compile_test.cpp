// Compiles the kernels of the CUDA table for several GPUs. Needs NVRTC, but no GPU and no driver.
#include <cstdlib>
#include <iomanip>
#include <iostream>
#include <regex>

#include "cuda/compiler.h"
#include "cuda/kernels.h"
#include "expect_error.h"
#include "gyre_test.h"
#include "ops/table.h"

namespace gyre::cuda {
namespace {

// What ptxas says about one entry function.
struct Resources {
  uint64_t registers = 0, shared = 0, stack = 0, spills = 0;
};

uint64_t number_before(const std::string& text, const char* words) {
  std::smatch match;
  const std::regex pattern(std::string("(\\d+) ") + words);
  return std::regex_search(text, match, pattern) ? std::stoull(match[1]) : 0;
}

Resources resources_of(const CompiledKernel& kernel) {
  const size_t begin = kernel.log.find("entry function '" + kernel.symbol + "'");
  if (begin == std::string::npos) return {};
  const size_t end = kernel.log.find("entry function", begin + 1);
  std::string text = kernel.log.substr(begin, end - begin);
  Resources used;
  used.stack = number_before(text, "bytes stack frame");
  used.spills = number_before(text, "bytes spill stores") + number_before(text, "bytes spill load");
  used.registers =
      std::stoull("0" + std::regex_replace(text, std::regex("[^]*Used (\\d+)[^]*"), "$1"));
  used.shared = number_before(text, "bytes smem");
  return used;
}

std::span<const uint64_t> specs_of(const CudaKernel& kernel) {
  if (kernel.specs != nullptr) return kernel.specs();
  for (const KernelUse& use : kernel_uses()) {
    if (use.kernel == kernel.info) return use.specs();
  }
  return {};  // nothing lists the kernel: its row finds no names
}

// The GPU of an architecture with the least shared memory.
CudaLimits limits_of(uint32_t arch) {
  if (arch == 80) return {108, 163 << 10, 164 << 10, arch};
  if (arch >= 90 && arch < 120) return {132, 227 << 10, 228 << 10, arch};
  return {84, 99 << 10, 100 << 10, arch};
}

// What a GPU of the architecture may run; of a template with many variants some from all over the
// list, unless all are asked for. The newest runs what the other two do.
std::vector<std::string> chosen_names(const CudaKernel& kernel, uint32_t arch) {
  const bool both_ends = arch == 80 || arch == 90;
  std::map<std::string, std::vector<std::string>> of_templates;
  std::set<std::string> seen;
  for (const uint64_t spec : specs_of(kernel)) {
    if (kernel.fits != nullptr && !kernel.fits(spec, limits_of(arch))) continue;
    const std::string name = kernel.name(spec);
    if (!name.empty() && seen.insert(name).second)
      of_templates[name.substr(0, name.find('<'))].push_back(name);
  }
  std::vector<std::string> some;
  for (const auto& [text, names] : of_templates) {
    if (std::getenv("GYRE_COMPILE_ALL") != nullptr) {
      some.insert(some.end(), names.begin(), names.end());
    } else if (both_ends) {
      some.push_back(names.front());
      if (names.size() > 1) some.push_back(names.back());
    } else {
      some.push_back(names[names.size() / 2]);
    }
  }
  return some;
}

void compile_and_print(const Nvrtc& compiler, const CudaKernel& kernel, uint32_t arch) {
  const std::string options = std::string(kernel.options != nullptr ? kernel.options : "") +
                              " --ptxas-options=-v --no-cache";
  for (const std::string& name : chosen_names(kernel, arch)) {
    CompiledKernel made;
    ASSERT_NO_THROW(made = compile(compiler, {kernel.file, name, options, arch})) << name;
    EXPECT_FALSE(made.cubin.empty());
    const Resources used = resources_of(made);
    std::cout << "sm_" << std::left << std::setw(5) << arch << std::setw(60) << name << std::right
              << std::setw(6) << used.registers << std::setw(10) << used.shared << std::setw(8)
              << used.stack << std::setw(8) << used.spills << '\n';
    EXPECT_NE(used.registers, 0u) << "nothing was found in the log:\n" << made.log;
    if (name.find("attention") != std::string::npos) {
      // attention_drafts spills before and behind its loop over stages. attention_latent spills
      // what its producers know of a work item; its variant for a Hopper is compiled for others,
      // too. attention_many_rows over levels lacks two registers on sm_80, attention_decode_paged
      // with 12 warps six.
      const auto is = [&](const char* part) { return name.find(part) != std::string::npos; };
      uint64_t few = 0;
      if (arch < 90 && is("attention_many_rows")) few = 16;
      if (arch < 90 && is("attention_decode_paged")) few = 48;
      const uint64_t most = is("attention_drafts") ? 1024 : (is("attention_latent") ? 2048 : few);
      EXPECT_LE(used.spills, most) << name;
    }
  }
}

void compile_table(uint32_t arch) {
  const Nvrtc& compiler = nvrtc(0);
  if (!compiler.reason.empty()) GTEST_SKIP() << compiler.reason;
  if (arch == 0) arch = compiler.newest_arch;
  if (arch > compiler.newest_arch) GTEST_SKIP() << compiler.version_text() << " ends before it";
  std::cout << "NVRTC " << compiler.version_text() << "\narch    " << std::left << std::setw(60)
            << "kernel"
            << "  regs    shared   stack  spills\n";
  for (const CudaKernel& kernel : kernel_table()) compile_and_print(compiler, kernel, arch);
}

// CTest runs each of the three as an entry of its own.
TEST(CudaCompile, EveryKernelForSm80) { compile_table(80); }
TEST(CudaCompile, EveryKernelForSm90) { compile_table(90); }
TEST(CudaCompile, EveryKernelForTheNewest) { compile_table(0); }

TEST(CudaCompile, AFailureCarriesTheLog) {
  const Nvrtc& compiler = nvrtc(0);
  if (!compiler.reason.empty()) GTEST_SKIP() << compiler.reason;
  const auto make = [&](const char* file, const char* name, const char* options) {
    compile(compiler, {file, name, options, 80});
  };
  EXPECT_TRUE(test::throws_error(ErrorCode::compile_failed,
                                 {"kv_copy.cu", "no_such_kernel", "error"},
                                 [&] { make("kv_copy.cu", "gyre::cuda::no_such_kernel", ""); }));
  EXPECT_TRUE(test::throws_error(ErrorCode::compile_failed, {"none.cu"},
                                 [&] { make("none.cu", "none", ""); }));
  EXPECT_TRUE(test::throws_error(ErrorCode::compile_failed, {"cache.cu", "--no-such-option"}, [&] {
    make("cache.cu", "gyre::cuda::kv_extend", "--no-such-option");
  }));
}

// What scripts/gpu_sanitize.sh sets.
TEST(CudaCompile, TheEnvironmentAddsOptions) {
  const Nvrtc& compiler = nvrtc(0);
  if (!compiler.reason.empty()) GTEST_SKIP() << compiler.reason;
  const auto make = [&](const char* name) {
    return compile(compiler, {"attention/many_rows/many_rows.cu", name, "--no-cache", 90}).cubin;
  };
  // Without producers' barriers, and with them.
  for (const char* const name : {"gyre::cuda::attention_many_rows<1u, 2u, 64u, 64u, 1u>",
                                 "gyre::cuda::attention_many_rows<18u, 18u, 64u, 64u, 1u>"}) {
    const std::vector<char> plain = make(name);
    setenv("GYRE_NVRTC_OPTIONS", "-DGYRE_RACECHECK", 1);
    std::vector<char> checked;
    EXPECT_NO_THROW(checked = make(name));
    unsetenv("GYRE_NVRTC_OPTIONS");
    EXPECT_NE(plain, checked) << name;
  }
  setenv("GYRE_NVRTC_OPTIONS", "-lineinfo --no-such-option", 1);
  EXPECT_TRUE(test::throws_error(ErrorCode::compile_failed, {"--no-such-option"}, [&] {
    make("gyre::cuda::attention_many_rows<1u, 2u, 64u, 64u, 1u>");
  }));
  unsetenv("GYRE_NVRTC_OPTIONS");
}

TEST(CudaTable, NamesAKernelForEverySpecThatAnOpCanAskFor) {
  for (const CudaKernel& kernel : kernel_table()) {
    EXPECT_FALSE(chosen_names(kernel, 90).empty()) << kernel.info->name;
    EXPECT_NE(kernel.launch, nullptr) << kernel.info->name;
  }
}

}  // namespace
}  // namespace gyre::cuda
