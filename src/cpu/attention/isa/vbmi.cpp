// As vnni.cpp, where VBMI and GFNI unpack codes in fewer instructions: the same integers. Nothing
// here may be instantiated elsewhere: the file is compiled with instructions other machines lack.
#include "cpu/attention/isa/dot_levels_avx512.h"

namespace gyre::cpu {

AttentionKernels vbmi_attention_kernels() { return dot_kernels("avx512vbmi"); }

}  // namespace gyre::cpu
