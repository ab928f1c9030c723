#include "metal/kernels.h"

namespace gyre::metal {
namespace {

constexpr MetalKernel kTable[] = {
    {&kKvCopy.info, "kv_copy.metal", launch_kv_copy},
    {&kKvExtend.info, "kv_extend.metal", launch_kv_extend},
    {&kBytesCopy.info, "bytes_copy.metal", launch_bytes_copy},
    {&kWordsWrite.info, "words_write.metal", launch_words_write},
    {&kKvPageCopy.info, "kv_page_copy.metal", launch_kv_page_copy},
    {&kRope.info, "rope.metal", launch_rope},
    {&kRopeAppend.info, "rope_append.metal", launch_rope_append},
    {&kHadamard.info, "hadamard.metal", launch_hadamard},
    {&kKvQuantize.info, "write_tiles.metal", launch_write},
    {&kKvDequantize.info, "kv_dequantize.metal", launch_kv_dequantize},
    {&kKvAppend.info, "write_tiles.metal", launch_write},
    {&kKvWrite.info, "write_tiles.metal", launch_write},
    {&kKvFeedback.info, "kv_feedback.metal", launch_kv_feedback},
    {&kKvTransform.info, "kv_transform.metal", launch_kv_transform},
    {&kAttention.info, "attention.metal", launch_attention, has_attention, plan_attention},
    {&kAttentionDecode.info, "attention_decode.metal", launch_attention_decode},
    {&kAttentionManyRows.info, "attention_many_rows.metal", launch_attention_many_rows},
    {&kAttentionMerge.info, "attention_merge.metal", launch_attention_merge},
};

}  // namespace

std::span<const MetalKernel> kernel_table() { return kTable; }

}  // namespace gyre::metal
