#pragma once

#include <memory>

#include "cuda/compiler.h"
#include "cuda/context.h"
#include "runtime/lazy_pipeline.h"

namespace gyre::cuda {

// A kernel on its way from source to the GPU.
class CudaPipeline final : public LazyPipeline {
 public:
  CudaPipeline(std::shared_ptr<const Context> context, KernelCompiler& compiler,
               const KernelInfo& kernel, const CudaKernel& row, uint64_t key);
  ~CudaPipeline() override;

  const CudaKernel& row() const { return row_; }
  CuFunction function() const { return function_; }  // after finish()
  bool from_cache() const { return from_cache_; }    // after finish()
  // Refuses a launch that the kernel cannot have on this GPU; after finish().
  void check(const Launch& launch) const;

 private:
  void load() const override;

  const std::shared_ptr<const Context> context_;
  KernelCompiler& compiler_;
  const CudaKernel& row_;

  mutable bool from_cache_ = false;
  mutable CuModule module_ = nullptr;
  mutable CuFunction function_ = nullptr;
  mutable uint32_t max_threads_ = 0, max_shared_bytes_ = 0;  // of a block
};

CompileJob compile_job(const KernelInfo& kernel, const CudaKernel& row, uint64_t spec,
                       const CudaLimits& limits);

}  // namespace gyre::cuda
