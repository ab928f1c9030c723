#include "metal/pipeline.h"

#include "runtime/require.h"

namespace gyre::metal {

MetalPipeline::~MetalPipeline() {
  if (state_ != nullptr) api_.pipeline_free(state_);
}

void MetalPipeline::load() const {
  Library* const library = libraries_.get(row_.file);
  const PipelineResult made = api_.pipeline_make(
      library, kernel->name, {static_cast<uint32_t>(spec), static_cast<uint32_t>(spec >> 32)});
  if (made.state == nullptr)
    fail(ErrorCode::compile_failed, row_.file, ": ", kernel->name, " for spec 0x", std::hex, spec,
         ": ", made.error.empty() ? "no reason was given" : made.error);
  state_ = made.state;
  max_threads_ = made.max_threads;
}

}  // namespace gyre::metal
