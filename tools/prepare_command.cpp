#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <iostream>
#include <memory>
#include <optional>
#include <string>

#include "commands.h"
#include "gyre/gyre.h"
#include "model_options.h"
#include "options.h"
#include "progress_output.h"

namespace gyre::tools {
namespace {

struct PrepareArguments {
  std::string preset;
  ModelNumbers numbers;
  std::vector<bench::FormatPair> formats = {{KvFormat::tq8, KvFormat::tq4}};
  std::optional<uint64_t> v_head_dim;
  uint64_t context = 32768, step_tokens = 512, tail = 0, sink_tokens = 0, page_tokens = 64;
  std::string dtype = "f16", device = "cuda:0", folder, use = "both";
  std::optional<uint32_t> arch;
  bool norm = false, adjacent = false, tree_mask = false, list = false;
};

DType dtype_of(const std::string& text) {
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    if (name(dtype) == text) return dtype;
  }
  throw Error(ErrorCode::invalid_argument,
              "prepare: --dtype must be f32, f16 or bf16, got \"" + text + "\"");
}

ModelShape shape_of(const PrepareArguments& arguments) {
  const bench::ModelShape model = chosen_model("prepare", arguments.preset, arguments.numbers);
  ModelShape shape;
  shape.heads = model.heads;
  shape.kv_heads = model.kv_heads;
  shape.head_dim = model.head_dim;
  shape.v_head_dim = arguments.v_head_dim.value_or(model.rotary_dim);
  shape.layers.clear();
  for (const bench::FormatPair& pair : arguments.formats) {
    const bool compressed = pair.compressed();
    const KvLayer layer{.k = pair.k,
                        .v = pair.v,
                        .tail = compressed ? arguments.tail : 0,
                        .sink_tokens = compressed ? arguments.sink_tokens : 0,
                        .latent = model.latent()};
    const std::vector<KvLayer> layers = kv_layers(
        model.layers, {.layer = layer, .window = model.window, .full_every = model.full_every});
    shape.layers.insert(shape.layers.end(), layers.begin(), layers.end());
  }
  shape.context = arguments.context;
  shape.step_tokens = arguments.step_tokens;
  shape.dtype = dtype_of(arguments.dtype);
  if (arguments.adjacent) shape.rope->pairing = RopePairing::adjacent;
  shape.norm = arguments.norm;
  shape.tree_mask = arguments.tree_mask;
  shape.page_tokens = arguments.page_tokens;
  shape.use_cache = arguments.use != "batch";
  shape.use_batch = arguments.use != "cache";
  return shape;
}

// prepare() would compile all the same, and keep nothing.
void check_folder(const std::string& folder) {
  if (folder.empty()) return;
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error || access(folder.c_str(), W_OK | X_OK) != 0)
    throw Error(ErrorCode::io, "prepare: cannot write to the folder \"" + folder + "\"");
}

void run_prepare(const PrepareArguments& arguments) {
  if (arguments.list) return list_models();
  if (arguments.use != "both" && arguments.use != "cache" && arguments.use != "batch")
    throw Error(ErrorCode::invalid_argument,
                "prepare: --use must be cache, batch or both, got \"" + arguments.use + "\"");
  const ModelShape shape = shape_of(arguments);
  const std::string device_name =
      arguments.arch ? "cuda:sm_" + std::to_string(*arguments.arch) : arguments.device;
  const Device device = Device::open(device_name, {.kernel_cache = arguments.folder});
  check_folder(arguments.folder);
  const auto begin = std::chrono::steady_clock::now();
  std::vector<PreparedKernel> kernels;
  {
    ProgressBar bar;
    kernels = prepare(device, shape, [&](const PrepareProgress& now) {
      char seconds[32];
      std::snprintf(seconds, sizeof(seconds), "%.1f s", now.kernel.seconds);
      bar.show(std::to_string(now.done) + " of " + std::to_string(now.all) + ": " +
                   now.kernel.name + (now.kernel.compiled ? std::string(", ") + seconds : ""),
               static_cast<double>(now.done) / static_cast<double>(now.all));
    });
  }
  const std::chrono::duration<double> passed = std::chrono::steady_clock::now() - begin;
  const auto compiled =
      std::ranges::count_if(kernels, [](const PreparedKernel& kernel) { return kernel.compiled; });
  if (kernels.empty()) {
    std::cout << "device " << device.info().name << " has nothing to build\n";
  } else if (compiled == 0) {
    std::cout << "all " << kernels.size() << " kernels were there\n";
  } else {
    std::printf("%zu kernels, %zu of them compiled, %.1f s\n", kernels.size(),
                static_cast<size_t>(compiled), passed.count());
  }
}

}  // namespace

void add_prepare_command(CLI::App& app) {
  CLI::App* command = app.add_subcommand(
      "prepare",
      "Compile the kernels that a model needs ahead of its first token, into the folder of\n"
      "compiled kernels. With --arch for GPUs that are not here: NVRTC is enough, so that an\n"
      "image or a package can carry the folder.\n\n"
      "Examples:\n"
      "  gyre prepare llama-3.1-8b\n"
      "  gyre prepare --list                             the models it knows\n"
      "  gyre prepare qwen3-8b --norm --formats tq8/tq4,f16 --context 128k --tail 128\n"
      "  gyre prepare --heads 24 --kv-heads 4 --head-dim 256 --dtype bf16 --use batch\n"
      "  gyre prepare llama-3.1-8b --arch 90 --folder kernels");
  const auto arguments = std::make_shared<PrepareArguments>();
  PrepareArguments& a = *arguments;
  command->add_option("preset", a.preset, "A model that --list shows");
  command->add_flag("--list", a.list, "Show the presets and stop");
  add_device(*command, a.device);
  command->add_option("--arch", a.arch, "Compute capability without the dot, instead of a device")
      ->type_name("N");
  command->add_option("--folder", a.folder,
                      "Folder of compiled kernels; not given: GYRE_KERNEL_CACHE or the user's");
  add_formats(*command, a.formats, "Formats of K/V, a list")->default_str("tq8/tq4");
  add_count(*command, "--v-head-dim", a.v_head_dim, "Coordinates of a head of V; as --head-dim");
  add_count(*command, "--context", a.context, "Most tokens of a sequence")->capture_default_str();
  add_count(*command, "--step", a.step_tokens, "Most tokens of a sequence in one step")
      ->capture_default_str();
  add_count(*command, "--tail", a.tail, "Newest tokens that compressed formats keep in f16",
            {.min = 0})
      ->capture_default_str();
  add_count(*command, "--sink-tokens", a.sink_tokens, "First tokens that they keep in f16",
            {.min = 0})
      ->capture_default_str();
  add_count(*command, "--page-tokens", a.page_tokens, "Tokens of a page")->capture_default_str();
  command->add_option("--dtype", a.dtype, "Of q, k, v and the output: f32, f16, bf16")
      ->capture_default_str();
  command->add_option("--use", a.use, "KvCache (cache), KvPool and KvBatch (batch), or both")
      ->capture_default_str();
  command->add_flag("--norm", a.norm, "The model normalises heads of q and k (norm_rope)");
  command->add_flag("--adjacent", a.adjacent, "rope turns adjacent coordinates, not halves");
  command->add_flag("--tree-mask", a.tree_mask, "Tree masks will be given (speculative decoding)");
  add_model_numbers(*command, a.numbers);
  command->callback([arguments] { run_prepare(*arguments); });
}

}  // namespace gyre::tools
