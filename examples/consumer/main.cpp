// Uses the installed library the way any other project does: lists the devices, then writes six
// tokens into a ring of four slots and checks what is left in it.
#include <gyre/gyre.h>

#include <iostream>

int main() {
  for (const gyre::DeviceInfo& info : gyre::devices()) {
    std::cout << info.name << ": " << (info.available ? info.description : info.reason) << '\n';
  }

  const gyre::Device device = gyre::Device::open("cpu");
  const gyre::Tensor k = device.tensor(gyre::DType::f32, {6, 1, 1});
  const gyre::Tensor cache = device.tensor(gyre::DType::bf16, {4, 1, 1});
  for (int token = 0; token < 6; ++token) k.data<float>()[token] = static_cast<float>(token);

  gyre::Encoder encoder(device);
  gyre::kv_copy(encoder, {.k = k, .k_cache = cache}, {.cache = gyre::CacheKind::ring});
  encoder.submit().wait();

  constexpr float kExpected[] = {4, 5, 2, 3};  // tokens 4 and 5 took the slots of 0 and 1
  for (int slot = 0; slot < 4; ++slot) {
    const auto value = static_cast<float>(cache.data<const gyre::BFloat16>()[slot]);
    std::cout << "slot " << slot << ": " << value << '\n';
    if (value != kExpected[slot]) return 1;
  }
}
