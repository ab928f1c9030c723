// Calls in the README's style: what is needed is named, the rest is left out. -Wextra must have
// nothing to say about any public struct, so each of them stands here with a single member.
#include <gyre/gyre.h>

namespace {

using namespace gyre;

void record_ops(const Device& device, Encoder& encoder, const Tensor& t, const KvBuffer& cache) {
  kv_copy(encoder, {.k = t, .k_cache = t}, {.position = 1});
  kv_copy(encoder, {.k = t, .k_cache = t}, {.cache = CacheKind::ring});
  rope(encoder, {.x = t, .positions = t, .out = t}, {.mode = RopeMode::plain});
  norm_rope(encoder, {.x = t, .positions = t, .out = t}, {.epsilon = 1e-5f});
  hadamard(encoder, {.x = t, .out = t}, {.signs = HadamardSigns::native});
  kv_quantize(encoder, {.k = t, .k_cache = cache}, {.tokens = 1});
  kv_quantize(encoder, {.v = t, .v_cache = cache});
  kv_dequantize(encoder, {.cache = cache, .out = t}, {.domain = KvDomain::rotated});
  attention(encoder, {.q = t, .k_cache = cache, .v_cache = cache, .out = t}, {.length = 1});
  attention_partial(encoder, {.q = t, .k_cache = cache, .v_cache = cache, .partial = t},
                    {.scale = 0.5f});
  attention_merge(encoder, {.partial = t, .out = t});
  rope_table(device, rope_frequencies({.rotary_dim = 64}).inverse);
}

void use_cache(const Device& device, Encoder& encoder, const Tensor& t) {
  KvCache cache(device, {.kv_heads = 1, .head_dim = 64, .capacity = 8});
  cache.append(encoder, 0, t, t);
  cache.attend(encoder, 0, {.q = t, .out = t}, {.scale = 0.5f});
  kv_layers(2, {.edge_layers = 1});
  kv_layers(2, {.layer = {.tail = 64}});
}

void serve(const Device& device, Encoder& encoder, const Tensor& t) {
  const KvPool pool(device, {.kv_heads = 1, .head_dim = 64, .pages = 8});
  KvBatch batch(pool, {.max_tokens = 8});
  KvSequence sequence = pool.sequence();
  batch.begin_step(encoder, {{.sequence = sequence}, {.sequence = sequence, .is_prefill = true}});
  batch.append(encoder, 0, t, t);
  batch.attend(encoder, 0, {.q = t, .out = t}, {.mask = {.soft_cap = 30.0f}});
  kv_write(encoder, {.k = t, .v = t, .slots = t});
  kv_page_copy(encoder, {.from = t, .to = t});
  (void)kv_page_bytes({.kv_heads = 1, .head_dim = 64});
}

bool ask(const Device& device) {
  return supports(device, KvCopyTypes{.source = DType::f16}) &&
         supports(device, RopeTypes{.x = DType::f16}) &&
         supports(device, KvQuantizeTypes{.format = KvFormat::tq4}) &&
         supports(device, AttentionTypes{.q = DType::f16});
}

// What the library hands out, where a caller makes one.
[[maybe_unused]] const DeviceInfo kInfo{.name = "cpu"};
[[maybe_unused]] const MemoryUse kMemory{.in_use_bytes = 1};
[[maybe_unused]] const KernelDescription kKernel{.name = "rope"};
[[maybe_unused]] const KvFormatInfo kFormat{.format = KvFormat::tq4};
[[maybe_unused]] const KvBuffer kBuffer{.shape = {.head_dim = 64}};
[[maybe_unused]] const KvLayerInfo kLayer{.layer = {.k = KvFormat::f16}};
[[maybe_unused]] const KvGroupInfo kGroup{.name = "all keys"};
[[maybe_unused]] const KvPoolInfo kPool{.bytes = 1};
[[maybe_unused]] const KvSnapshotInfo kSnapshot{.version = 2};
[[maybe_unused]] const KvSnapshotSection kSection{.layer = 1};
[[maybe_unused]] const KvSnapshotSlots kSlots{.body = 1};
[[maybe_unused]] const RopeFrequencies kFrequencies{.attention_factor = 1};
[[maybe_unused]] const TraceEvent kEvent{.kernel = "rope"};
[[maybe_unused]] const TraceSpan kSpan{.thread = 1};

}  // namespace

int main() {
  const Device device = Device::open("cpu", {.threads = 1});
  Encoder encoder(device);
  const Tensor t = device.tensor(DType::f32, {1, 1, 64});
  record_ops(device, encoder, t, KvBuffer::allocate(device, {.head_dim = 64}));
  use_cache(device, encoder, t);
  serve(device, encoder, t);
  return ask(device) ? 0 : 1;
}
