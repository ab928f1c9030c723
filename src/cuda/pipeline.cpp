#include "cuda/pipeline.h"

#include <utility>

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
  if (module_ == nullptr) return;
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
  int fixed = 0;
  context_->check(api.function_get(&fixed, kCuStaticSharedBytes, function_), "cuFuncGetAttribute");
  context_->check(api.function_set(function_, kCuMaxDynamicSharedBytes,
                                   static_cast<int>(limits.shared_bytes_per_block) - fixed),
                  "cuFuncSetAttribute");
  from_cache_ = compiled->from_cache;
}

}  // namespace gyre::cuda
