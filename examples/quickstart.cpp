#include <gyre/gyre.h>

#include <algorithm>
#include <iostream>

int main() {
  const gyre::Device device = gyre::Device::open("cpu");
  // One layer, 32 query heads over 8 KV heads. By default keys have 8 bits, values 4, and the
  // newest 128 tokens and the first one 16.
  gyre::KvCache cache(device, {.kv_heads = 8, .head_dim = 128, .capacity = 1024});
  const gyre::Tensor q = device.tensor(gyre::DType::f32, {1, 32, 128});
  const gyre::Tensor k = device.tensor(gyre::DType::f32, {1, 8, 128});
  const gyre::Tensor v = device.tensor(gyre::DType::f32, {1, 8, 128});
  const gyre::Tensor out = device.tensor(gyre::DType::f32, {1, 32, 128});

  gyre::Encoder encoder(device);
  for (int token = 0; token < 500; ++token) {
    std::ranges::fill(v.data<float>(), static_cast<float>(token));  // a model fills q, k and v
    cache.begin_step(encoder, 1);
    cache.append(encoder, 0, k, v);
    cache.attend(encoder, 0, {.q = q, .out = out});
    encoder.submit().wait();
  }
  // A query of zeros gives every key the same weight.
  std::cout << "the mean of 0 to 499, most from 4 bits each: " << out.data<float>()[0] << '\n';
}
