#pragma once
// Kernels for instructions that Highway does not offer. What a machine lacks, products-inl.h does
// in f32.

#include "isa/levels.h"
#include "isa/matrix.h"

namespace gyre::ggml {

// Null where the machine has none, or after use_isa_kernels(false).
const MatrixKernels* matrix_kernels();
const LevelKernels* level_kernels();
void use_isa_kernels(bool use);  // for tests; not while attention runs

}  // namespace gyre::ggml
