#include "kernels.h"

#include <Eigen/Core>
#include <cmath>
#include <string>

namespace tiny_model {
namespace {

using Matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using gyre::Access;

struct NormParams {
  uint64_t size;
  float epsilon;
};
struct LinearParams {
  uint64_t tokens, columns, rows, add;
};
struct SwigluParams {
  uint64_t count;
};

// What the kernels of CUDA begin with.
constexpr const char* kArgs = R"(
using uint64_t = unsigned long long;
struct Args { uint64_t at[16]; };
__device__ float* floats(uint64_t at) { return reinterpret_cast<float*>(at); }
__device__ float warp_sum(float x) {
  for (int distance = 16; distance != 0; distance /= 2) x += __shfl_xor_sync(~0u, x, distance);
  return x;
}
)";

float* floats(uint64_t address) { return reinterpret_cast<float*>(address); }
Eigen::Map<Matrix> matrix(uint64_t address, uint64_t rows, uint64_t columns) {
  return {floats(address), static_cast<Eigen::Index>(rows), static_cast<Eigen::Index>(columns)};
}
struct Part {
  Eigen::Index begin, size;
};
Part part_of(uint64_t items, uint32_t task, uint32_t tasks) {
  const uint64_t begin = items * task / tasks, end = items * (task + 1) / tasks;
  return {static_cast<Eigen::Index>(begin), static_cast<Eigen::Index>(end - begin)};
}

// A task, or a block, is a token.
void norm_task(const void* params, const uint64_t* args, uint32_t task,
               uint32_t /*tasks*/) noexcept {
  const auto& p = *static_cast<const NormParams*>(params);
  const auto size = static_cast<Eigen::Index>(p.size);
  const Eigen::Map<const Eigen::ArrayXf> x(floats(args[0]) + task * p.size, size);
  const Eigen::Map<const Eigen::ArrayXf> weight(floats(args[1]), size);
  const float scale = 1 / std::sqrt(x.square().sum() / static_cast<float>(p.size) + p.epsilon);
  Eigen::Map<Eigen::ArrayXf>(floats(args[2]) + task * p.size, size) = x * scale * weight;
}
constexpr const char* kNorm = R"(
struct Params { uint64_t size; float epsilon; };
__global__ void norm(const Params p, const Args args) {
  const float* x = floats(args.at[0]) + blockIdx.x * p.size;
  float* out = floats(args.at[2]) + blockIdx.x * p.size;
  float sum = 0;
  for (uint64_t i = threadIdx.x; i < p.size; i += 32) sum += x[i] * x[i];
  const float scale = rsqrtf(warp_sum(sum) / p.size + p.epsilon);
  for (uint64_t i = threadIdx.x; i < p.size; i += 32) out[i] = x[i] * scale * floats(args.at[1])[i];
}
)";

// A task is some columns of the output; a warp is one element of it.
void linear_task(const void* params, const uint64_t* args, uint32_t task, uint32_t tasks) noexcept {
  const auto& p = *static_cast<const LinearParams*>(params);
  const Part part = part_of(p.rows, task, tasks);
  const auto x = matrix(args[0], p.tokens, p.columns);
  const auto weight = matrix(args[1], p.rows, p.columns).middleRows(part.begin, part.size);
  auto out = matrix(args[2], p.tokens, p.rows).middleCols(part.begin, part.size);
  if (p.add != 0) {
    out.noalias() += x * weight.transpose();
  } else {
    out.noalias() = x * weight.transpose();
  }
}
constexpr const char* kLinear = R"(
struct Params { uint64_t tokens, columns, rows, add; };
__global__ void linear(const Params p, const Args args) {
  const uint64_t row = blockIdx.x * 4 + threadIdx.x / 32, token = blockIdx.y;
  if (row >= p.rows) return;
  const float* x = floats(args.at[0]) + token * p.columns;
  const float* weight = floats(args.at[1]) + row * p.columns;
  float sum = 0;
  for (uint64_t i = threadIdx.x % 32; i < p.columns; i += 32) sum += x[i] * weight[i];
  sum = warp_sum(sum);
  float* out = floats(args.at[2]) + token * p.rows + row;
  if (threadIdx.x % 32 == 0) *out = p.add != 0 ? *out + sum : sum;
}
)";

void swiglu_task(const void* params, const uint64_t* args, uint32_t task, uint32_t tasks) noexcept {
  const Part part = part_of(static_cast<const SwigluParams*>(params)->count, task, tasks);
  Eigen::Map<Eigen::ArrayXf> gate(floats(args[0]) + part.begin, part.size);
  gate = gate / (1 + (-gate).exp()) *
         Eigen::Map<Eigen::ArrayXf>(floats(args[1]) + part.begin, part.size);
}
constexpr const char* kSwiglu = R"(
struct Params { uint64_t count; };
__global__ void swiglu(const Params p, const Args args) {
  const uint64_t i = blockIdx.x * uint64_t{128} + threadIdx.x;
  if (i >= p.count) return;
  const float gate = floats(args.at[0])[i];
  floats(args.at[0])[i] = gate / (1 + expf(-gate)) * floats(args.at[1])[i];
}
)";

gyre::CustomCuda cuda(const char* text, const char* name) {
  return {std::string(kArgs) + text, name};
}
uint32_t blocks(uint64_t items, uint64_t each) {
  return static_cast<uint32_t>((items + each - 1) / each);
}

constexpr uint32_t kTasks = 16;

}  // namespace

Kernels::Kernels()
    : norm_({.name = "norm",
             .args = {{"x", Access::read}, {"weight", Access::read}, {"out", Access::write}},
             .params_bytes = sizeof(NormParams),
             .cpu = norm_task,
             .cuda = cuda(kNorm, "norm")}),
      linear_({.name = "linear",
               .args = {{"x", Access::read}, {"weight", Access::read}, {"out", Access::read_write}},
               .params_bytes = sizeof(LinearParams),
               .cpu = linear_task,
               .cuda = cuda(kLinear, "linear")}),
      swiglu_({.name = "swiglu",
               .args = {{"gate", Access::read_write}, {"up", Access::read}},
               .params_bytes = sizeof(SwigluParams),
               .cpu = swiglu_task,
               .cuda = cuda(kSwiglu, "swiglu")}) {}

void Kernels::norm(gyre::Encoder& encoder, const gyre::Tensor& x, const gyre::Tensor& weight,
                   float epsilon, const gyre::Tensor& out) const {
  const uint64_t size = weight.elements();
  const auto tokens = static_cast<uint32_t>(x.elements() / size);
  norm_(encoder, NormParams{size, epsilon}, {x, weight, out},
        {.tasks = tokens, .grid = {tokens, 1, 1}, .block = 32});
}

void Kernels::linear(gyre::Encoder& encoder, const gyre::Tensor& x, const gyre::Tensor& weight,
                     const gyre::Tensor& out, bool add) const {
  const uint64_t rows = weight.shape(0), columns = weight.shape(1);
  const uint64_t tokens = x.elements() / columns;
  linear_(encoder, LinearParams{tokens, columns, rows, add ? 1u : 0u}, {x, weight, out},
          {.tasks = kTasks, .grid = {blocks(rows, 4), static_cast<uint32_t>(tokens), 1}});
}

void Kernels::swiglu(gyre::Encoder& encoder, const gyre::Tensor& gate,
                     const gyre::Tensor& up) const {
  swiglu_(encoder, SwigluParams{gate.elements()}, {gate, up},
          {.tasks = kTasks, .grid = {blocks(gate.elements(), 128), 1, 1}});
}

}  // namespace tiny_model
