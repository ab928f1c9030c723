#include "options.h"

#include "gyre/error.h"

namespace gyre::tools {
namespace {

// What `read` refuses, as CLI11 wants it; empty where it refuses nothing.
template <class Read>
std::string refusal_of(const Read& read) {
  try {
    read();
  } catch (const Error& error) {
    return error.what();
  }
  return {};
}

// An option whose value is a list of what `read` makes of each part.
template <class T, class Read>
CLI::Option* add_list(CLI::App& app, const std::string& flag, std::vector<T>& values,
                      const Read& read) {
  return app.add_option_function<std::string>(flag, [&values, flag, read](const std::string& text) {
    const std::string refusal = refusal_of([&] {
      values.clear();
      for (const std::string& part : parse_list(text)) values.push_back(read(part));
    });
    if (!refusal.empty()) throw CLI::ValidationError(flag, refusal);
  });
}

}  // namespace

CLI::Validator count_validator(const CountRange& range) {
  const auto check = [range](std::string& text) {
    return refusal_of([&] { text = std::to_string(parse_count(text, range)); });
  };
  return {check, ""};
}

CLI::Validator seconds_validator() {
  const auto check = [](std::string& text) { return refusal_of([&] { parse_seconds(text); }); };
  return {check, ""};
}

CLI::Option* add_contexts(CLI::App& app, std::vector<uint64_t>& contexts, const std::string& help) {
  return add_list(app, "--context", contexts,
                  [](const std::string& text) { return parse_count(text); })
      ->description(help)
      ->type_name("N,N,...");
}

CLI::Option* add_formats(CLI::App& app, std::vector<bench::FormatPair>& formats,
                         const std::string& help) {
  return add_list(app, "--formats", formats, bench::format_pair)
      ->description(help)
      ->type_name("K/V,...");
}

CLI::Option* add_device(CLI::App& app, std::string& device) {
  return app.add_option("--device", device, "Device, as `gyre devices` names it")
      ->capture_default_str();
}

CLI::Option* add_threads(CLI::App& app, std::optional<uint32_t>& threads) {
  return add_count(app, "--threads", threads,
                   "CPU threads; not given or 0: GYRE_THREADS or all cores", {0, 1024});
}

}  // namespace gyre::tools
