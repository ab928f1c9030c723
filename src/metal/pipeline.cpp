#include "metal/pipeline.h"

#include "runtime/require.h"

namespace gyre::metal {

MetalPipeline::~MetalPipeline() {
  if (state_ != nullptr && process_ == process_generation()) api_.pipeline_free(state_);
}

void MetalPipeline::load() const {
  const CustomMetal* const own = kernel->code != nullptr ? &kernel->code->code.metal : nullptr;
  const char* const file = own != nullptr ? kernel->name : row_.file;
  if (text_ == nullptr)
    text_ = own != nullptr ? libraries_.find(file, own->source) : libraries_.find(file);
  const std::string stem = std::string(file).substr(0, std::string_view(file).find('.'));
  const PipelineResult made =
      api_.pipeline_make(text_->compiled(), own != nullptr ? own->name.c_str() : stem.c_str(),
                         {static_cast<uint32_t>(spec), static_cast<uint32_t>(spec >> 32)});
  if (made.state == nullptr)
    fail(ErrorCode::compile_failed, file, ": ", kernel->name, " for spec 0x", std::hex, spec, ": ",
         made.error.empty() ? "no reason was given" : made.error);
  state_ = made.state;
  max_threads_ = made.max_threads;
}

}  // namespace gyre::metal
