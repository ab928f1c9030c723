#include "ops/table.h"

namespace gyre {

std::span<const KernelUse> kernel_uses() {
  static constexpr KernelUse kUses[] = {
      {&kKvCopy.info, kv_copy_shape, kv_copy_specs},
      {&kRope.info, rope_shape, rope_specs},
      {&kHadamard.info, hadamard_shape, hadamard_specs},
      {&kKvQuantize.info, kv_quantize_shape, kv_quantize_specs},
      {&kKvDequantize.info, kv_dequantize_shape, kv_dequantize_specs},
      {&kKvFeedback.info, kv_feedback_shape, kv_feedback_specs},
      {&kKvTransform.info, kv_transform_shape, kv_transform_specs},
      {&kAttention.info, attention_shape, attention_specs},
      {&kAttentionDecode.info, attention_shape},
      {&kAttentionManyRows.info, attention_shape},
      {&kAttentionLatent.info, attention_shape},
      {&kAttentionSchedule.info, attention_schedule_shape, plain_specs},
      {&kAttentionMerge.info, attention_merge_shape, attention_merge_specs},
      {&kKvExtend.info, kv_extend_shape, plain_specs},
      {&kKvAppend.info, kv_append_shape, kv_append_specs},
      {&kKvWrite.info, kv_write_shape, kv_write_specs},
      {&kRopeAppend.info, rope_append_shape, rope_append_specs},
      {&kKvPageCopy.info, kv_page_copy_shape, plain_specs},
      {&kBytesCopy.info, bytes_copy_shape, plain_specs},
      {&kWordsWrite.info, words_write_shape, plain_specs},
  };
  return kUses;
}

}  // namespace gyre
