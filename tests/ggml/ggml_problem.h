#pragma once
// Problems of the ggml integration with memory of their own, and what they come to in double
// precision.

#include <cstdint>
#include <functional>
#include <random>
#include <vector>

#include "integrations/ggml/problem.h"

namespace gyre::ggml::test {

struct Shape {
  uint64_t tokens = 1, cells = 64, heads = 4, kv_heads = 2, k_dim = 64, v_dim = 64;
  uint64_t streams = 1, kv_streams = 1;
  RowType k = RowType::f16, v = RowType::f16;
  uint64_t mask_heads = 1, mask_streams = 1;
  float scale = 0.125f, max_bias = 0, soft_cap = 0;
  bool head_major = false;  // cells of a head lie together, not heads of a cell
  bool sinks = false;
  uint32_t seed = 1;
  // f32 of the mask for (head, token, cell); null: no mask.
  std::function<float(uint64_t, uint64_t, uint64_t)> mask;
};

class Memory {
 public:
  explicit Memory(const Shape& shape);

  Problem problem;
  std::vector<uint8_t> k, v;
  std::vector<float> q, out, sinks;
  std::vector<uint16_t> mask;

  std::vector<float> run(uint32_t threads);
  // What run() should give, [stream][token][head][v_dim].
  std::vector<double> expected() const;

 private:
  Rows cache(std::vector<uint8_t>& bytes, RowType type, uint64_t dim, const Shape& shape);
  std::mt19937 random_;
};

// One row of a type, from floats to bytes and back.
void encode_row(RowType type, const float* values, uint64_t count, uint8_t* bytes);
void decode_row(RowType type, const uint8_t* bytes, uint64_t count, double* values);

// Normalised mean squared error.
double nmse(const std::vector<float>& got, const std::vector<double>& want);

}  // namespace gyre::ggml::test
