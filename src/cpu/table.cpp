#include "cpu/attention/isa/kernels.h"
#include "cpu/attention/planner.h"
#include "cpu/device.h"
#include "cpu/kernels.h"

namespace gyre::cpu {

std::span<const CpuKernel> kernel_table() {
  static constexpr CpuKernel kTable[] = {
      {&kKvCopy.info, select_kv_copy, kv_copy_tasks},
      {&kRope.info, select_rope, rope_tasks},
      {&kHadamard.info, select_hadamard, hadamard_tasks},
      {&kKvQuantize.info, select_write, write_tasks},
      {&kKvDequantize.info, select_kv_dequantize, kv_dequantize_tasks},
      {&kKvFeedback.info, select_kv_feedback, kv_feedback_tasks},
      {&kKvTransform.info, select_kv_transform, kv_transform_tasks},
      {&kAttention.info, select_attention, attention_tasks, describe_attention, plan_attention,
       kAttentionScratchBytes, zeroed_by_attention},
      {&kAttentionMerge.info, select_attention_merge, attention_merge_tasks},
      {&kKvExtend.info, select_kv_extend, one_task},
      {&kKvAppend.info, select_write, write_tasks},
      {&kKvWrite.info, select_write, write_tasks},
      {&kRopeAppend.info, select_rope_append, rope_append_tasks},
      {&kKvPageCopy.info, select_kv_page_copy, kv_page_copy_tasks},
      {&kBytesCopy.info, select_bytes_copy, bytes_copy_tasks},
      {&kWordsWrite.info, select_words_write, one_task},
  };
  return kTable;
}

}  // namespace gyre::cpu
