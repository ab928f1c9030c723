// Devices, encoders, graphs, traces, kernels of the caller's, and preparing.
#include <sstream>

#include "runtime/internals.h"
#include "stress/fuzz_world.h"

namespace gyre::test {
namespace {

struct AddParams {
  uint64_t count = 0;
  float value = 0;
};

void add_task(const void* params, const uint64_t* args, uint32_t task, uint32_t tasks) noexcept {
  const auto& with = *static_cast<const AddParams*>(params);
  auto* const to = reinterpret_cast<float*>(args[0]);
  if (to == nullptr) return;
  for (uint64_t i = task; i < with.count; i += tasks) to[i] += with.value;
}

void fuzz_custom(FuzzWorld& w, FuzzInput& in) {
  CustomCode code{.name = in.spoil() ? "" : "add",
                  .args = {{"x", Access::read_write}, {"y", Access::read}},
                  .params_bytes = in.number(sizeof(AddParams)),
                  .cpu = in.spoil() ? nullptr : add_task,
                  .cuda = {}};
  if (in.spoil()) code.args.resize(in.below(20));
  if (!code.args.empty() && in.spoil()) code.args[0].access = static_cast<Access>(in.byte());
  std::optional<CustomKernel> kernel;
  if (!w.call("CustomKernel", [&] { kernel.emplace(std::move(code)); })) return;
  w.call("supports", [&] { supports(w.some_device(), *kernel); });
  const Tensor x = w.packed(DType::f32, {1 + in.below(50)});
  std::vector<Tensor> args = {x, in.chance(2) ? Tensor() : w.tensor(w.any_type(), {3, 4})};
  if (in.spoil()) args.resize(in.below(20));
  const AddParams params{x.dtype() == DType::f32 && x.is_contiguous() ? x.elements() : 0, 1.0f};
  std::span<const std::byte> raw = std::as_bytes(std::span(&params, 1));
  if (in.spoil()) raw = raw.first(in.below(raw.size()));
  const CustomLaunch launch{.tasks = static_cast<uint32_t>(in.below(20))};
  const bool compare = w.checked() && launch.tasks != 0 && w.submit();
  const std::vector<float> before = compare ? values(x) : std::vector<float>();
  const bool done =
      w.call("CustomKernel::record", [&] { kernel->record(w.some_encoder(), raw, args, launch); });
  if (!done || !compare || in.spoiled() || !w.submit()) return;
  const std::vector<float> now = values(x);
  for (size_t i = 0; i < now.size(); ++i)
    expect(now[i] == before[i] + 1.0f, "a task did not run once");
  ++fuzz_stats().compared;
}

void fuzz_submit(FuzzWorld& w, FuzzInput& /*in*/) { w.submit(); }

void fuzz_encoder(FuzzWorld& w, FuzzInput& in) {
  switch (in.below(6)) {
    case 0: {
      w.call("Encoder::clear", [&] { w.encoder.clear(); });
      expect(w.encoder.size() == 0, "a cleared encoder has commands");
      break;
    }
    case 1:
      w.call("Encoder::submit_on", [&] { w.encoder.submit_on(in.number(0)); });
      break;
    case 2:
      w.call("Encoder::submit", [&] { w.moved.submit(); });
      break;
    case 3:
      w.call("Encoder::instantiate", [&] { w.moved.instantiate(); });
      break;
    case 4:
      w.call("Encoder", [&] { const Encoder none{device_of(nullptr)}; });
      break;
    default: {
      Encoder taken = std::move(w.encoder);
      w.encoder = Encoder(w.device);
      w.encoder = std::move(taken);
      break;
    }
  }
}

void fuzz_graph(FuzzWorld& w, FuzzInput& in) {
  if (in.chance(2) && !w.heavy()) {
    std::optional<Graph> made;
    const uint32_t size = w.encoder.size();
    if (w.call("Encoder::instantiate", [&] { made.emplace(w.encoder.instantiate()); })) {
      expect(made->size() == size, "a graph of another size than its list");
      if (w.graphs.size() > 3) w.graphs.erase(w.graphs.begin());
      w.graphs.push_back(std::move(*made));
      w.call("Graph::replay", [&] { made->replay(); });  // NOLINT(bugprone-use-after-move): refused
    }
    return;
  }
  if (w.graphs.empty()) return;
  const Graph& graph = w.graphs[in.below(w.graphs.size())];
  w.call("Graph::replay", [&] { graph.replay().wait(); });
  w.call("Graph::size", [&] { graph.size(); });
}

void fuzz_device(FuzzWorld& w, FuzzInput& in) {
  const Device gone = device_of(nullptr);
  const Device& device = in.spoil() ? gone : w.device;
  switch (in.below(12)) {
    case 0: {
      constexpr std::array<const char*, 7> kNames = {"cpu",   "",      "cuda:0", "cuda:99999999999",
                                                     "metal", "cpu:1", "CPU "};
      DeviceOptions options{
          .threads = static_cast<uint32_t>(in.number(1)), .spin_us = 0, .kernel_cache = "off"};
      if (options.threads != 1) options.threads |= 0x10000;  // refused: more than any machine has
      if (in.chance(16)) w.call("Device::open", [&] { Device::open(in.one_of(kNames), options); });
      break;
    }
    case 1:
      w.call("Device::memory", [&] { device.memory(); });
      break;
    case 2:
      w.call("Device::trim", [&] { device.trim(); });
      break;
    case 3:
      w.call("Device::wait", [&] { device.wait(); });
      break;
    case 4:
      w.call("Device::stream", [&] { device.stream(); });
      break;
    case 5:
      w.call("supports", [&] { supports(device, KvCopyTypes{w.any_type(), w.any_type()}); });
      break;
    case 6:
      w.call("supports", [&] { supports(device, RopeTypes{w.any_type(), w.any_type()}); });
      break;
    case 7:
      w.call("supports", [&] {
        supports(device, KvQuantizeTypes{w.any_type(), static_cast<KvFormat>(in.byte())});
      });
      break;
    case 8:
      w.call("supports", [&] {
        supports(device,
                 AttentionTypes{w.any_type(), static_cast<KvFormat>(in.byte()),
                                static_cast<KvFormat>(in.byte()), w.any_type(), in.chance(2)});
      });
      break;
    case 9:
      if (in.chance(16)) w.call("Device::kernels", [&] { device.kernels(); });
      break;
    case 10:
      if (in.chance(64)) w.call("devices", [] { devices(); });
      break;
    default:
      w.call("Device::info", [&] { device.info(); });
  }
}

void fuzz_trace(FuzzWorld& w, FuzzInput& in) {
  if (in.chance(2)) {
    w.call("Device::start_trace", [&] { w.device.start_trace(); });
    return;
  }
  Trace trace;
  if (!w.call("Device::stop_trace", [&] { trace = w.device.stop_trace(); })) return;
  if (trace.events.size() > 50) trace.events.resize(50);
  std::ostringstream out;
  w.call("Trace::write", [&] {
    trace.write_text(out);
    trace.write_table(out);
    trace.write_chrome(out);
  });
}

void fuzz_prepare(FuzzWorld& w, FuzzInput& in) {
  const uint64_t kv_heads = 1 + in.below(2);
  ModelShape shape{.heads = in.number(kv_heads * 2),
                   .kv_heads = in.number(kv_heads),
                   .head_dim = w.head_dim(),
                   .v_head_dim = in.number(0),
                   .layers = {w.layer()},
                   .context = in.number(64 + in.below(64)),
                   .step_tokens = in.number(1 + in.below(32)),
                   .dtype = w.float_type()};
  if (in.chance(4)) shape.rope.reset();
  shape.norm = in.chance(3);
  shape.tree_mask = in.chance(3);
  shape.use_cache = !in.chance(3);
  shape.use_batch = !in.chance(3);
  shape.page_tokens = in.number(8 * (1 + in.below(4)));
  shape.max_sequences = in.number(1 + in.below(4));
  if (in.spoil()) shape.dtype = w.any_type();
  if (in.spoil()) shape.out_dtype = w.any_type();
  w.call("prepare", [&] { prepare(w.some_device(), shape); });
}

}  // namespace

std::span<const FuzzCall> fuzz_runtime_calls() {
  static constexpr FuzzCall kCalls[] = {fuzz_custom, fuzz_submit, fuzz_encoder, fuzz_graph,
                                        fuzz_device, fuzz_trace,  fuzz_prepare};
  return kCalls;
}

}  // namespace gyre::test
