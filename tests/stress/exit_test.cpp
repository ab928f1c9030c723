// A program that ends: objects that are destroyed last still submit, replay, save and are refused,
// and a thread that computes meanwhile disturbs nobody.
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <string>
#include <thread>

#include "gyre/gyre.h"
#include "gyre/gyre_c.h"

namespace {

using namespace gyre;

void demand(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "exit_test: %s\n", what);
  std::_Exit(1);
}

struct Talk {
  Device device = Device::open("cpu", {.threads = 2});
  Encoder encoder{device};
  KvCache cache{device,
                {.kv_heads = 2,
                 .head_dim = 64,
                 .capacity = 4096,
                 .layers = {{.k = KvFormat::f16, .v = KvFormat::f16}},
                 .step_tokens = 2048}};
  Tensor k = device.tensor(DType::f32, {2048, 2, 64}), q = device.tensor(DType::f32, {1, 8, 64}),
         out = device.tensor(DType::f32, {1, 8, 64});

  Talk() {
    for (float& x : k.data<float>()) x = 1;
    cache.begin_step(encoder, 2048);
    cache.append(encoder, 0, k, k);
    encoder.submit().wait();
  }
  bool answers() {
    cache.attend(encoder, 0, {.q = q, .out = out});
    encoder.submit().wait();
    const float x = out.data<const float>()[0];
    return x > 0.9f && x < 1.1f;
  }
};

struct Last {
  std::optional<Talk> talk, other;
  std::string path = "gyre_exit_test_" + std::to_string(getpid());
  std::atomic<bool> computes = false;

  ~Last() {  // after the objects of main's thread
    demand(computes, "the other thread has not begun");
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    talk->cache.begin_step(talk->encoder, 1024);
    talk->cache.append(talk->encoder, 0, talk->k.slice(0, 0, 1024), talk->k.slice(0, 0, 1024));
    demand(talk->answers(), "a wrong answer");
    talk->cache.save(path);
    demand(inspect_snapshot(path).length == 3072, "tokens are missing");
    std::remove(path.c_str());
    demand(gyre_device_open("abacus", nullptr, nullptr) != GYRE_OK, "it was opened");
    demand(std::strstr(gyre_last_error(), "device is NULL") != nullptr, gyre_last_error());
    std::puts("ended well");
    std::fflush(stdout);
    std::_Exit(0);
  }
};
Last last;

}  // namespace

int main() {
  gyre_device* none = nullptr;
  demand(gyre_device_open("abacus", nullptr, &none) != GYRE_OK, "an abacus was opened");
  last.talk.emplace();
  last.other.emplace();
  demand(last.talk->answers(), "a wrong answer");
  std::thread([] {
    for (;;) {
      demand(last.other->answers(), "a wrong answer of the other thread");
      last.computes = true;
    }
  }).detach();
  while (!last.computes) std::this_thread::yield();
}
