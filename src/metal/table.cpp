#include "metal/kernels.h"

namespace gyre::metal {
namespace {

constexpr MetalKernel kTable[] = {
    {&kKvCopy.info, "kv_copy.metal", launch_kv_copy},
    {&kKvExtend.info, "kv_extend.metal", launch_kv_extend},
    {&kBytesCopy.info, "bytes_copy.metal", launch_bytes_copy},
    {&kWordsWrite.info, "words_write.metal", launch_words_write},
    {&kKvPageCopy.info, "kv_page_copy.metal", launch_kv_page_copy},
};

}  // namespace

std::span<const MetalKernel> kernel_table() { return kTable; }

}  // namespace gyre::metal
