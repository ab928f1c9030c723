#include "cuda/compiler.h"

#include <cstring>
#include <sstream>
#include <utility>
#include <vector>

#include "cuda/sources.h"
#include "runtime/require.h"

namespace gyre::cuda {
namespace {

class Program {
 public:
  Program(const Nvrtc& nvrtc, const SourceFile& source) : nvrtc_(nvrtc) {
    std::vector<const char*> names, texts;
    for (const SourceFile& header : kernel_headers()) {
      names.push_back(header.name.c_str());
      texts.push_back(header.text.c_str());
    }
    const NvrtcResult result =
        nvrtc.create(&program_, source.text.c_str(), source.name.c_str(),
                     static_cast<int>(names.size()), texts.data(), names.data());
    if (result != kNvrtcSuccess)
      fail(ErrorCode::compile_failed, source.name, ": ", nvrtc.error_text(result));
  }
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;
  ~Program() { nvrtc_.destroy(&program_); }

  NvrtcProgram get() const { return program_; }
  std::string log() const {
    size_t bytes = 0;
    if (nvrtc_.log_size(program_, &bytes) != kNvrtcSuccess || bytes <= 1) return "";
    std::string text(bytes, '\0');
    nvrtc_.log(program_, text.data());
    text.resize(std::strlen(text.c_str()));  // without the zeros at its end
    return text;
  }

 private:
  const Nvrtc& nvrtc_;
  NvrtcProgram program_ = nullptr;
};

std::vector<std::string> option_list(const CompileJob& job) {
  // From 9.0 on there are instructions of one architecture alone; kernels are made for this one.
  std::vector<std::string> options = {
      "--std=c++20", "--device-as-default-execution-space",
      join("--gpu-architecture=sm_", job.arch, job.arch >= 90 ? "a" : "")};
  std::istringstream further{std::string(job.options)};
  for (std::string option; further >> option;) options.push_back(option);
  return options;
}

const SourceFile& checked_source(const CompileJob& job) {
  const SourceFile* const source = kernel_source(job.file);
  if (source == nullptr)
    fail(ErrorCode::compile_failed, job.file, ": the library holds no such kernel file");
  return *source;
}

CacheKey key_of(const Nvrtc& nvrtc, const CompileJob& job) {
  CacheKey key;
  key.add(nvrtc.version_text());
  key.add(job.name);
  for (const std::string& option : option_list(job)) key.add(option);
  const SourceFile& source = checked_source(job);
  key.add(source.name);
  key.add(source.text);
  for (const SourceFile& header : kernel_headers()) {
    key.add(header.name);
    key.add(header.text);
  }
  return key;
}

}  // namespace

CompiledKernel compile(const Nvrtc& nvrtc, const CompileJob& job) {
  const Program program(nvrtc, checked_source(job));
  const std::vector<std::string> options = option_list(job);
  std::vector<const char*> pointers;
  pointers.reserve(options.size());
  for (const std::string& option : options) pointers.push_back(option.c_str());
  const auto check = [&](NvrtcResult result, const char* step) {
    if (result == kNvrtcSuccess) return;
    fail(ErrorCode::compile_failed, job.file, ": ", job.name, " for sm_", job.arch, ": ", step,
         ": ", nvrtc.error_text(result), "\n", program.log());
  };
  check(nvrtc.add_name(program.get(), job.name.c_str()), "name");
  check(nvrtc.compile(program.get(), static_cast<int>(pointers.size()), pointers.data()),
        "compile");
  CompiledKernel kernel;
  const char* symbol = nullptr;
  check(nvrtc.lowered_name(program.get(), job.name.c_str(), &symbol), "lowered name");
  kernel.symbol = symbol;
  size_t bytes = 0;
  check(nvrtc.cubin_size(program.get(), &bytes), "cubin");
  kernel.cubin.resize(bytes);
  check(nvrtc.cubin(program.get(), kernel.cubin.data()), "cubin");
  kernel.log = program.log();
  return kernel;
}

CompiledKernel compile(const Nvrtc& nvrtc, const CompileJob& job, const KernelCache& cache) {
  const CacheKey key = key_of(nvrtc, job);
  if (std::optional<CompiledKernel> known = cache.load(key)) return std::move(*known);
  CompiledKernel kernel = compile(nvrtc, job);
  cache.store(key, kernel);
  return kernel;
}

}  // namespace gyre::cuda
