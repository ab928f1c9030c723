// Runs the model in python/tests/data/tiny-d128 from its files: prefill, then one token at a time.
// Its tokens are bytes; 256 starts a text. tests/examples compares its logits with transformers'.
#include <CLI/CLI.hpp>
#include <chrono>
#include <iostream>
#include <string>
#include <vector>

#include "config.h"
#include "model.h"
#include "safetensors.h"

namespace {

constexpr int32_t kStart = 256;

double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

int32_t most_probable(const tiny_model::RowVector& logits) {
  Eigen::Index token = 0;
  logits.maxCoeff(&token);
  return static_cast<int32_t>(token);
}

struct Request {
  std::string model, prompt = "The cache of a model is";
  std::string k = "tq8", v = "tq4", device = "cpu";
  uint64_t tail = 0, tokens = 64;
};

void generate(const Request& request) {
  const std::filesystem::path folder = request.model;
  const auto config = tiny_model::read_config(folder / "config.json");
  std::vector<int32_t> prompt = {kStart};
  for (const char byte : request.prompt) prompt.push_back(static_cast<unsigned char>(byte));
  tiny_model::Model model(
      gyre::Device::open(request.device), config,
      tiny_model::SafeTensors(folder / "model.safetensors"),
      {.k = gyre::kv_format(request.k), .v = gyre::kv_format(request.v), .tail = request.tail},
      prompt.size() + request.tokens);

  auto begin = std::chrono::steady_clock::now();
  tiny_model::RowVector logits = model.prefill(prompt);
  const double prefill_seconds = seconds_since(begin);

  std::cout << request.prompt;
  begin = std::chrono::steady_clock::now();
  for (uint64_t i = 0; i < request.tokens; ++i) {
    const int32_t token = most_probable(logits);
    if (token < 256) std::cout << static_cast<char>(token) << std::flush;
    logits = model.decode(token);
  }
  const double decode_seconds = seconds_since(begin);
  std::cout << "\n\n"
            << request.k << " keys, " << request.v << " values: " << model.cache().bytes() / 1024
            << " KiB of cache for " << model.cache().length() << " tokens\nprefill "
            << static_cast<double>(prompt.size()) / prefill_seconds << " tokens per second, decode "
            << static_cast<double>(request.tokens) / decode_seconds << '\n';
}

int run(int argc, char** argv) {
  Request request;
  CLI::App app("Generates text with the model of the tests");
  app.add_option("model", request.model, "folder with config.json and model.safetensors")
      ->required();
  app.add_option("--prompt", request.prompt)->capture_default_str();
  app.add_option("--tokens", request.tokens, "tokens to generate")->capture_default_str();
  app.add_option("--device", request.device, "cpu, or cuda:0")->capture_default_str();
  app.add_option("--k", request.k, "format of keys")->capture_default_str();
  app.add_option("--v", request.v, "format of values")->capture_default_str();
  app.add_option("--tail", request.tail, "newest tokens kept in f16")->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  generate(request);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const std::exception& error) {
    std::cerr << "tiny_model: " << error.what() << '\n';
    return 1;
  }
}
