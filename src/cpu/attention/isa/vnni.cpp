// Decode attention over levels with AVX-512 VNNI. Nothing here may be instantiated elsewhere: the
// file is compiled with instructions other machines lack.
#include "cpu/attention/isa/dot_levels_avx512.h"

namespace gyre::cpu {

AttentionKernels vnni_attention_kernels() { return dot_kernels("avx512vnni"); }

}  // namespace gyre::cpu
