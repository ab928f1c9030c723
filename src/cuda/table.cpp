#include "cuda/kernels.h"

namespace gyre::cuda {

std::span<const CudaKernel> kernel_table() {
  // No contraction where bits are the CPU's.
  constexpr const char* kExact = "--fmad=false";
  static constexpr CudaKernel kTable[] = {
      {&kKvCopy.info, "kv_copy.cu", name_kv_copy, launch_kv_copy},
      {&kRope.info, "rope.cu", name_rope, launch_rope, kExact},
      {&kHadamard.info, "hadamard.cu", name_hadamard, launch_hadamard, kExact},
      {&kKvQuantize.info, "write.cu", name_kv_quantize, launch_write, kExact},
      {&kKvDequantize.info, "kv_dequantize.cu", name_kv_dequantize, launch_kv_dequantize, kExact},
      {&kKvFeedback.info, "kv_feedback.cu", name_kv_feedback, launch_kv_feedback, kExact},
      {&kKvTransform.info, "kv_transform.cu", name_kv_transform, launch_kv_transform, kExact},
      {&kAttention.info, "attention/any/prefill.cu", name_attention, launch_attention, nullptr,
       nullptr, plan_attention},
      {&kAttentionDecode.info, "attention/decode/decode.cu", name_attention_decode,
       launch_attention_decode, nullptr, fits_attention_decode, nullptr, false,
       attention_decode_specs},
      {&kAttentionManyRows.info, "attention/many_rows/many_rows.cu", name_attention_many_rows,
       launch_attention_many_rows, nullptr, fits_attention_many_rows, nullptr, false,
       attention_rows_specs},
      {&kAttentionLatent.info, "attention/latent/latent.cu", name_attention_latent,
       launch_attention_latent, nullptr, fits_attention_latent, nullptr, false,
       attention_latent_specs},
      {&kAttentionSchedule.info, "attention/schedule.cu", name_attention_schedule,
       launch_attention_schedule},
      {&kAttentionMerge.info, "attention/merge.cu", name_attention_merge, launch_attention_merge},
      {&kKvExtend.info, "cache.cu", name_kv_extend, launch_kv_extend},
      {&kKvAppend.info, "write.cu", name_kv_append, launch_write, kExact},
      {&kKvWrite.info, "write.cu", name_kv_write, launch_write, kExact, nullptr, nullptr, true},
      {&kRopeAppend.info, "rope_append.cu", name_rope_append, launch_rope_append, kExact, nullptr,
       nullptr, true},
      {&kKvPageCopy.info, "cache.cu", name_kv_page_copy, launch_kv_page_copy},
      {&kBytesCopy.info, "cache.cu", name_bytes_copy, launch_bytes_copy},
      {&kWordsWrite.info, "cache.cu", name_words_write, launch_words_write},
  };
  return kTable;
}

}  // namespace gyre::cuda
