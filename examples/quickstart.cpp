#include <gyre/gyre.h>

#include <algorithm>
#include <iostream>

int main() {
  const gyre::Device device = gyre::Device::open("cpu");
  // 32 query heads over 8 KV heads, head_dim 128, room for 1024 tokens; keys in 8 bits, values in 4
  const gyre::Tensor q = device.tensor(gyre::DType::f32, {1, 32, 128});
  const gyre::Tensor k = device.tensor(gyre::DType::f32, {1, 8, 128});
  const gyre::Tensor v = device.tensor(gyre::DType::f32, {1, 8, 128});
  const gyre::Tensor out = device.tensor(gyre::DType::f32, {1, 32, 128});
  const auto k_cache =
      gyre::KvBuffer::allocate(device, {gyre::KvFormat::tq8, gyre::KvRole::k, 8, 1024, 128});
  const auto v_cache =
      gyre::KvBuffer::allocate(device, {gyre::KvFormat::tq4, gyre::KvRole::v, 8, 1024, 128});

  gyre::Encoder encoder(device);
  for (uint64_t position = 0; position < 100; ++position) {
    std::ranges::fill(v.data<float>(), static_cast<float>(position));  // a model fills q, k and v
    gyre::kv_quantize(encoder, {k, k_cache, v, v_cache}, {.position = position});
    gyre::attention(encoder, {.q = q, .k_cache = k_cache, .v_cache = v_cache, .out = out},
                    {.length = position + 1, .scale = 0.088f});
    encoder.submit().wait();
  }
  // A query of zeros gives every key the same weight.
  std::cout << "the mean of 0 to 99, from 4 bits each: " << out.data<float>()[0] << '\n';
}
