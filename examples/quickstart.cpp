#include <gyre/gyre.h>

#include <algorithm>
#include <iostream>

int main() {
  const gyre::Device device = gyre::Device::open("cpu");
  // 16 new tokens, 8 KV heads, head_dim 128; the f16 cache is head-major and has 1024 slots.
  const gyre::Tensor k = device.tensor(gyre::DType::f32, {16, 8, 128});
  const gyre::Tensor v = device.tensor(gyre::DType::f32, {16, 8, 128});
  const gyre::Tensor k_cache = device.tensor(gyre::DType::f16, {8, 1024, 128});
  const gyre::Tensor v_cache = device.tensor(gyre::DType::f16, {8, 1024, 128});
  std::ranges::fill(v.data<float>(), 0.1f);

  // Ops see a cache as [slots, kv_heads, head_dim]; permute gives that view, without a copy.
  const gyre::KvCopyInputs inputs = {
      .k = k, .k_cache = k_cache.permute({1, 0, 2}), .v = v, .v_cache = v_cache.permute({1, 0, 2})};
  gyre::Encoder encoder(device);
  gyre::kv_copy(encoder, inputs, {.position = 100});
  encoder.submit().wait();

  const gyre::Tensor last = v_cache.slice(0, 7, 1).slice(1, 115, 1);  // last head of the last token
  std::cout << "0.1 in f16 is " << static_cast<float>(last.data<const gyre::Half>()[0]) << '\n';
}
