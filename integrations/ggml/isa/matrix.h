#pragma once
// Many rows of queries times a block of cells on a matrix unit that multiplies bf16 and adds in
// f32. f32 operands are split into hi, the nearest bf16, and lo, the nearest to the rest; of a
// product, lo times lo is left out: 2^-16 of it at most. This holds for the weights of V, too, so
// that the sums keep almost the accuracy of f32.

#include <cstdint>

namespace gyre::ggml {

// Unpacked rows, [cell][stride]. Dims are multiples of 16 here.
struct MatrixBlock {
  const float* values;
  uint64_t stride;
  uint32_t keys, dim;
};

// What cells became.
enum class MatrixOperand : uint8_t {
  hi,  // lo is 0 everywhere
  hi_lo,
  unfit  // has numbers whose parts bf16 does not hold: use f32
};
constexpr MatrixOperand worse(MatrixOperand a, MatrixOperand b) { return a > b ? a : b; }

// The shape of the tiles that a thread had: ggml sets its own once per thread.
struct alignas(64) TileShape {
  uint8_t bytes[64] = {};
};

struct MatrixKernels {
  const char* name;
  void (*enter)(TileShape& before);
  void (*leave)(const TileShape& before);
  // q: [rows][dim]. False if queries are unfit.
  bool (*pack_queries)(const float* q, uint32_t rows, uint32_t dim, float* to);
  // Up to kMatrixSlice cells of a block, the first of them at slice * kMatrixSlice.
  MatrixOperand (*pack_keys)(const MatrixBlock& k, uint32_t slice, float* to);
  MatrixOperand (*pack_values)(const MatrixBlock& v, uint32_t slice, float* to);
  // logits[row][kBlockKeys], of rows up to a multiple of 16, and of whole slices of cells.
  void (*score)(const float* q, uint32_t rows, uint32_t dim, const float* k, MatrixOperand operand,
                uint32_t keys, float* logits);
  // acc[row][dim] = acc * rescale + p v, with p[row][kBlockKeys], 0 beyond the last cell.
  void (*accumulate)(const float* p, const float* rescale, uint32_t rows, const float* v,
                     MatrixOperand operand, uint32_t dim, float* acc);
};

// Floats that packed queries of kTileRows rows, or a packed block of kBlockKeys cells, take.
constexpr uint64_t matrix_floats(uint64_t dim) { return 64 * ((dim + 31) / 32 * 32); }
constexpr uint32_t kMatrixSlice = 32;  // cells that are packed at a time
// Rows of an item from which on packing K and V pays.
constexpr uint32_t kMatrixRows = 32;

MatrixKernels amx_matrix_kernels();  // called only where the machine has AMX

}  // namespace gyre::ggml
