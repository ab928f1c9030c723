// kv_quantize against the f32-to-f16 kv_copy of the same tokens, in turns: what compression costs
// at the time of writing.
#include "bench.h"
#include "gyre/gyre.h"
#include "machine_kernels.h"
#include "noise.h"
#include "timing.h"

namespace gyre::bench {
namespace {

constexpr uint64_t kHeads = 8, kHeadDim = 128, kCapacity = 8192, kPosition = 1000;

struct Case {
  uint64_t tokens;
  KvFormat format;
};

constexpr Case kCases[] = {
    {512, KvFormat::tq8}, {512, KvFormat::tq6}, {512, KvFormat::tq5}, {512, KvFormat::tq4},
    {512, KvFormat::tq3}, {512, KvFormat::tq2}, {1, KvFormat::tq8},   {1, KvFormat::tq4},
};

// Values as a model would make them: zeros would code in no time.
Tensor rows(const Device& device, uint64_t tokens) {
  return noise(device, {tokens, kHeads, kHeadDim}, 1);
}

Graph record_quantize(const Device& device, const Case& c) {
  const KvShape k{c.format, KvRole::k, kHeads, kCapacity, kHeadDim};
  const KvShape v{c.format, KvRole::v, kHeads, kCapacity, kHeadDim};
  Encoder encoder(device);
  kv_quantize(encoder,
              {.k = rows(device, c.tokens),
               .k_cache = KvBuffer::allocate(device, k),
               .v = rows(device, c.tokens),
               .v_cache = KvBuffer::allocate(device, v)},
              {.position = kPosition});
  return encoder.instantiate();
}

Graph record_copy(const Device& device, const Case& c) {
  const auto cache = [&] {
    return device.tensor(DType::f16, {kHeads, kCapacity, kHeadDim}).permute({1, 0, 2});
  };
  Encoder encoder(device);
  kv_copy(encoder,
          {.k = rows(device, c.tokens),
           .k_cache = cache(),
           .v = rows(device, c.tokens),
           .v_cache = cache()},
          {.position = kPosition});
  return encoder.instantiate();
}

Row measure(const Device& device, const Case& c, const Options& options) {
  const uint64_t elements = 2 * c.tokens * kHeads * kHeadDim;
  const uint64_t sets = c.tokens == 1 ? 2 : rotation(elements * (sizeof(float) + sizeof(Half)));
  std::vector<Graph> own, copies;
  for (uint64_t i = 0; i < sets; ++i) {
    own.push_back(record_quantize(device, c));
    copies.push_back(record_copy(device, c));
    own.back().replay().wait();
    copies.back().replay().wait();
  }
  const auto times = in_turns(own, copies, options);
  Row row = make_row(options, device, "kv_quantize",
                     {{"format", std::string(name(c.format))},
                      {"tokens", c.tokens},
                      {"kv_heads", kHeads},
                      {"head_dim", kHeadDim},
                      {"streams", std::string("k+v")}},
                     times[0]);
  row.set_against("kv_copy f32 to f16", times[1]);
  return row;
}

}  // namespace

std::vector<Row> run_kv_quantize(const Options& options, const Progress& progress) {
  const auto text = [](const Case& c) {
    return "kv_quantize " + std::string(name(c.format)) + ", " + std::to_string(c.tokens) +
           " tokens";
  };
  return measure_cases(options, progress, kCases, text, measure);
}

}  // namespace gyre::bench
