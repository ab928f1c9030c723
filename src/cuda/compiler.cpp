#include "cuda/compiler.h"

#include <cstdlib>
#include <cstring>
#include <exception>
#include <sstream>
#include <utility>
#include <vector>

#include "cuda/sources.h"
#include "runtime/require.h"

namespace gyre::cuda {
namespace {

struct JobSources {
  SourceFile source;
  std::vector<const SourceFile*> headers;
};
JobSources checked_sources(const CompileJob& job) {
  if (!job.text.empty()) return {{std::string(job.file), std::string(job.text)}, {}};
  KernelSources sources = kernel_sources(job.file);
  if (sources.source == nullptr)
    fail(ErrorCode::compile_failed, job.file, ": the library holds no such kernel file");
  return {*sources.source, std::move(sources.headers)};
}

ErrorCode code_of(NvrtcResult result) {
  return result == kNvrtcOutOfMemory ? ErrorCode::out_of_memory : ErrorCode::compile_failed;
}

class Program {
 public:
  Program(const Nvrtc& nvrtc, const JobSources& sources) : nvrtc_(nvrtc) {
    std::vector<const char*> names, texts;
    for (const SourceFile* header : sources.headers) {
      names.push_back(header->name.c_str());
      texts.push_back(header->text.c_str());
    }
    const SourceFile& source = sources.source;
    const NvrtcResult result =
        nvrtc.create(&program_, source.text.c_str(), source.name.c_str(),
                     static_cast<int>(names.size()), texts.data(), names.data());
    if (result != kNvrtcSuccess) fail(code_of(result), source.name, ": ", nvrtc.error_text(result));
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
  const auto add = [&](const char* text) {
    std::istringstream further(text);
    for (std::string option; further >> option;) options.push_back(option);
  };
  add(std::string(job.options).c_str());
  if (const char* const text = std::getenv("GYRE_NVRTC_OPTIONS"); text != nullptr) add(text);
  return options;
}

CacheKey key_of(const Nvrtc& nvrtc, const CompileJob& job) {
  CacheKey key;
  key.add(nvrtc.version_text());
  key.add(job.name);
  for (const std::string& option : option_list(job)) key.add(option);
  const JobSources sources = checked_sources(job);
  const auto add = [&](const SourceFile& file) {
    key.add(file.name);
    key.add(file.text);
  };
  add(sources.source);
  for (const SourceFile* header : sources.headers) add(*header);
  return key;
}

}  // namespace

CompiledKernel compile(const Nvrtc& nvrtc, const CompileJob& job) {
  const Program program(nvrtc, checked_sources(job));
  const std::vector<std::string> options = option_list(job);
  std::vector<const char*> pointers;
  pointers.reserve(options.size());
  for (const std::string& option : options) pointers.push_back(option.c_str());
  const auto check = [&](NvrtcResult result, const char* step) {
    if (result == kNvrtcSuccess) return;
    fail(code_of(result), job.file, ": ", job.name, " for sm_", job.arch, ": ", step, ": ",
         nvrtc.error_text(result), "\n", program.log());
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

KernelCompiler::Kernel KernelCompiler::get(const CompileJob& job) {
  const CacheKey key = key_of(nvrtc_, job);
  std::promise<Kernel> promise;
  std::shared_future<Kernel> result;
  const std::string name = key.text();  // once: the entry must go, memory or not
  bool compiles_here = false;
  {
    const std::lock_guard lock(mutex_);
    const auto [found, is_new] = in_progress_.try_emplace(name);
    if (is_new) found->second = promise.get_future().share();
    result = found->second;
    compiles_here = is_new;
  }
  if (!compiles_here) return result.get();
  try {
    promise.set_value(make(key, job));
  } catch (...) {
    promise.set_exception(std::current_exception());
  }
  {
    const std::lock_guard lock(mutex_);
    in_progress_.erase(name);
  }
  return result.get();
}

KernelCompiler::Kernel KernelCompiler::make(const CacheKey& key, const CompileJob& job) const {
  if (std::optional<CompiledKernel> known = cache_.load(key))
    return std::make_shared<const CompiledKernel>(std::move(*known));
  auto kernel = std::make_shared<const CompiledKernel>(compile(nvrtc_, job));
  cache_.store(key, *kernel);
  return kernel;
}

}  // namespace gyre::cuda
