// rope against memcpy of as many bytes; the fused forms against the calls they replace, in turns.
#include "bench.h"
#include "gyre/gyre.h"
#include "machine_kernels.h"
#include "timing.h"

namespace gyre::bench {
namespace {

constexpr uint64_t kHeadDim = 128;

struct Buffers {
  Tensor q, k, positions, weight;
};

Buffers make_buffers(const Device& device, uint64_t tokens, uint64_t heads, uint64_t kv_heads) {
  Buffers b{device.tensor(DType::f32, {tokens, heads, kHeadDim}),
            device.tensor(DType::f32, {tokens, kv_heads, kHeadDim}),
            device.tensor(DType::i32, {tokens}), device.tensor(DType::f32, {kHeadDim})};
  const auto positions = b.positions.data<int32_t>();
  for (size_t i = 0; i < positions.size(); ++i) positions[i] = static_cast<int32_t>(i) + 100000;
  // Not all ones: in place, values must neither die out nor grow.
  for (const Tensor& t : {b.q, b.k, b.weight}) {
    const auto data = t.data<float>();
    for (size_t i = 0; i < data.size(); ++i) data[i] = i % 2 == 0 ? 1.0f : -1.0f;
  }
  return b;
}

using Record = void (*)(Encoder&, const Buffers&);

void record_rope(Encoder& e, const Buffers& b) {
  rope(e, {.x = b.q, .positions = b.positions, .out = b.q});
}
void record_fused(Encoder& e, const Buffers& b) {
  rope(e, {.x = b.q, .positions = b.positions, .out = b.q, .k = b.k, .k_out = b.k});
}
void record_apart(Encoder& e, const Buffers& b) {
  rope(e, {.x = b.q, .positions = b.positions, .out = b.q});
  rope(e, {.x = b.k, .positions = b.positions, .out = b.k});
}
void record_norm_rope(Encoder& e, const Buffers& b) {
  norm_rope(e, {.x = b.q, .positions = b.positions, .out = b.q, .weight = b.weight});
}
void record_norm_then_rope(Encoder& e, const Buffers& b) {
  norm_rope(e, {.x = b.q, .out = b.q, .weight = b.weight}, {.rope = std::nullopt});
  rope(e, {.x = b.q, .positions = b.positions, .out = b.q});
}
// The bytes of q through kv_copy, into a cache that lies as q does.
void record_kv_copy(Encoder& e, const Buffers& b) {
  const Tensor cache = e.device().tensor(DType::f32, b.q.shape());
  kv_copy(e, {.k = b.q, .k_cache = cache});
}
void record_limit(Encoder& e, const Buffers& b) {
  const Tensor target = e.device().tensor(DType::f32, b.q.shape());
  record_memcpy(e, b.q, target);
}

struct Case {
  const char* name;
  uint64_t tokens, heads, kv_heads;
  Record record;
  Record other;
  const char* against;  // null: the bandwidth
};

constexpr Case kCases[] = {
    {"in place", 512, 32, 8, record_rope, record_limit, nullptr},
    {"in place", 1, 32, 8, record_rope, record_kv_copy, "kv_copy of the same bytes"},
    {"q and k in one dispatch", 1, 32, 8, record_fused, record_apart, "two dispatches"},
    {"q and k in one dispatch", 512, 32, 8, record_fused, record_apart, "two dispatches"},
    {"norm_rope", 1, 32, 8, record_norm_rope, record_norm_then_rope, "norm, then rope"},
    {"norm_rope", 512, 32, 8, record_norm_rope, record_norm_then_rope, "norm, then rope"},
};

Row measure(const Device& device, const Case& c, const Options& options) {
  const uint64_t bytes = 2 * c.tokens * c.heads * kHeadDim * sizeof(float);
  const uint64_t sets = c.tokens == 1 ? 1 : rotation(bytes);
  std::vector<Graph> own, other;
  for (uint64_t i = 0; i < sets; ++i) {
    const Buffers buffers = make_buffers(device, c.tokens, c.heads, c.kv_heads);
    Encoder encoder(device);
    c.record(encoder, buffers);
    own.push_back(encoder.instantiate());
    c.other(encoder, make_buffers(device, c.tokens, c.heads, c.kv_heads));
    other.push_back(encoder.instantiate());
    own.back().replay().wait();
    other.back().replay().wait();
  }
  const auto times = in_turns(own, other, options);
  Row row = make_row(options, device, "rope",
                     {{"case", std::string(c.name)},
                      {"tokens", c.tokens},
                      {"heads", c.heads},
                      {"kv_heads", c.kv_heads},
                      {"head_dim", kHeadDim}},
                     times[0]);
  if (c.against == nullptr) {
    row.set_limit(bytes, static_cast<double>(bytes) / times[1] / 1e3);
  } else {
    row.set_against(c.against, times[1]);
  }
  return row;
}

}  // namespace

std::vector<Row> run_rope(const Options& options, const Progress& progress) {
  const auto text = [](const Case& c) {
    return "rope " + std::string(c.name) + ", " + std::to_string(c.tokens) + " tokens";
  };
  return measure_cases(options, progress, kCases, text, measure);
}

}  // namespace gyre::bench
