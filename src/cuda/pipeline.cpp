#include "cuda/pipeline.h"

#include <utility>

#include "runtime/require.h"

namespace gyre::cuda {

CompileJob compile_job(const KernelInfo& kernel, const CudaKernel& row, uint64_t spec,
                       const CudaLimits& limits) {
  if (kernel.code != nullptr) {
    const CustomCuda& cuda = kernel.code->code.cuda;
    return {kernel.name, cuda.name, "", limits.arch, cuda.source};
  }
  return {row.file, row.name(spec), row.options != nullptr ? row.options : "", limits.arch};
}

CudaPipeline::CudaPipeline(std::shared_ptr<const Context> context, KernelCompiler& compiler,
                           const KernelInfo& info, const CudaKernel& row, uint64_t key)
    : LazyPipeline(info, key), context_(std::move(context)), compiler_(compiler), row_(row) {}

CudaPipeline::~CudaPipeline() {
  if (module_ == nullptr || context_->is_inherited()) return;
  const Current current(*context_);
  context_->api().module_unload(module_);
}

void CudaPipeline::load() const {
  const CudaLimits& limits = context_->limits();
  const Driver& api = context_->api();
  const CompileJob job = compile_job(*kernel, row_, spec, limits);
  const KernelCompiler::Kernel compiled = compiler_.get(job);
  const char* const name = job.name.c_str();
  const Current current(*context_);
  if (module_ == nullptr) context_->check(api.module_load(&module_, compiled->cubin.data()), name);
  context_->check(api.module_function(&function_, module_, compiled->symbol.c_str()), name);
  // Whatever a launch asks for: beyond 48 KiB a kernel needs leave.
  int threads = 0, fixed = 0;
  context_->check(api.function_get(&threads, kCuMaxThreadsPerBlock, function_),
                  "cuFuncGetAttribute");
  context_->check(api.function_get(&fixed, kCuStaticSharedBytes, function_), "cuFuncGetAttribute");
  const int dynamic = static_cast<int>(limits.shared_bytes_per_block) - fixed;
  context_->check(api.function_set(function_, kCuMaxDynamicSharedBytes, dynamic),
                  "cuFuncSetAttribute");
  max_threads_ = static_cast<uint32_t>(threads);
  max_shared_bytes_ = static_cast<uint32_t>(dynamic);
  from_cache_ = compiled->from_cache;
}

void CudaPipeline::check(const Launch& launch) const {
  constexpr uint32_t kMaxBlocks[] = {0x7FFFFFFF, 65535, 65535};
  const auto rule = [&](const char* what, uint64_t limit, uint64_t asked) {
    if (asked <= limit) return;
    fail(ErrorCode::unsupported, kernel->name, ": ", context_->name(), " runs it with ", what,
         " of at most ", limit, ", the launch asks for ", asked);
  };
  rule("threads a block", max_threads_, launch.block);
  rule("bytes of dynamic shared memory", max_shared_bytes_, launch.shared_bytes);
  for (int d = 0; d < 3; ++d) rule("blocks in a dimension", kMaxBlocks[d], launch.grid[d]);
}

}  // namespace gyre::cuda
