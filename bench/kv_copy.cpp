// kv_copy against memcpy moving as many bytes with as many threads, in turns. Both walk through
// more memory than the last-level cache holds, because a cache that is written once per token is
// cold.
#include "bench.h"
#include "gyre/gyre.h"
#include "machine_kernels.h"
#include "noise.h"
#include "timing.h"

namespace gyre::bench {
namespace {

struct Case {
  uint64_t tokens, kv_heads, head_dim;
  DType source, cache;
  bool pair;  // K and V in one dispatch
};

constexpr Case kCases[] = {
    {512, 8, 128, DType::f32, DType::f32, false},   {512, 8, 128, DType::f16, DType::f16, false},
    {512, 8, 128, DType::bf16, DType::bf16, false}, {512, 8, 128, DType::f32, DType::f16, false},
    {512, 8, 128, DType::f32, DType::bf16, false},  {512, 8, 128, DType::bf16, DType::f16, false},
    {512, 8, 128, DType::f16, DType::f32, false},   {512, 8, 128, DType::f16, DType::f16, true},
    {512, 8, 128, DType::f32, DType::f16, true},    {4096, 8, 128, DType::f32, DType::f16, true},
    {1, 8, 128, DType::f32, DType::f16, true},
};

// A cache of a size people use; the copy goes somewhere in the middle of it.
constexpr uint64_t kCapacity = 8192, kPosition = 1000;

Tensor head_major(const Device& device, const Case& c) {
  return device.tensor(c.cache, {c.kv_heads, kCapacity, c.head_dim}).permute({1, 0, 2});
}

Graph record_copy(const Device& device, const Case& c) {
  const Dims shape{c.tokens, c.kv_heads, c.head_dim};
  KvCopyInputs inputs{touched(device.tensor(c.source, shape)), head_major(device, c), {}, {}};
  if (c.pair) {
    inputs.v = touched(device.tensor(c.source, shape));
    inputs.v_cache = head_major(device, c);
  }
  Encoder encoder(device);
  kv_copy(encoder, inputs, {.position = kPosition});
  return encoder.instantiate();
}

Graph record_limit(const Device& device, uint64_t bytes_moved) {
  const Tensor source = touched(device.tensor(DType::u8, {bytes_moved / 2}));
  const Tensor target = device.tensor(DType::u8, {bytes_moved / 2});
  Encoder encoder(device);
  record_memcpy(encoder, source, target);
  return encoder.instantiate();
}

Row measure(const Device& device, const Case& c, const Options& options) {
  const uint64_t elements = c.tokens * c.kv_heads * c.head_dim * (c.pair ? 2 : 1);
  const uint64_t bytes = elements * (size_bytes(c.source) + size_bytes(c.cache));
  const uint64_t sets = rotation(bytes);
  std::vector<Graph> copies, limits;
  for (uint64_t i = 0; i < sets; ++i) {
    copies.push_back(record_copy(device, c));
    limits.push_back(record_limit(device, bytes));
    copies.back().replay().wait();  // touches the pages, which come as zeros on first use
    limits.back().replay().wait();
  }
  const auto times = in_turns(copies, limits, options);
  Row row = make_row(options, device, "kv_copy",
                     {{"tokens", c.tokens},
                      {"kv_heads", c.kv_heads},
                      {"head_dim", c.head_dim},
                      {"source", std::string(name(c.source))},
                      {"cache", std::string(name(c.cache))},
                      {"streams", std::string(c.pair ? "k+v" : "k")}},
                     times[0]);
  row.set_limit(bytes, static_cast<double>(bytes) / times[1] / 1e3);
  return row;
}

}  // namespace

std::vector<Row> run_kv_copy(const Options& options, const Progress& progress) {
  const auto text = [](const Case& c) {
    return "kv_copy " + std::string(name(c.source)) + " to " + std::string(name(c.cache)) + ", " +
           std::to_string(c.tokens) + " tokens";
  };
  return measure_cases(options, progress, kCases, text, measure);
}

}  // namespace gyre::bench
