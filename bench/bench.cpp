#include "bench.h"

#include "did_you_mean.h"
#include "runtime/require.h"
#include "timing.h"

namespace gyre::bench {
namespace {

struct Suite {
  const char* name;
  std::vector<Row> (*run)(const Options&, const Progress&);
};

// A new op's benchmark is a row here.
constexpr Suite kSuites[] = {
    {"runtime", run_runtime},
    {"kv_copy", run_kv_copy},
    {"rope", run_rope},
    {"kv_quantize", run_kv_quantize},
    {"attention", run_attention},
    {"kv_cache", run_kv_cache},
    {"kv_calibration", run_cpu_kv_calibration},
    {"serving", run_serving},
};

bool on_cpu(const Options& options) { return options.device == "cpu"; }

std::vector<std::string> names(const Options& options) {
  if (!on_cpu(options))
    return {"kv_copy",       "rope",           "kv_quantize", "attention",
            "kv_cache step", "kv_calibration", "serving"};
  std::vector<std::string> all;
  for (const Suite& suite : kSuites) all.emplace_back(suite.name);
  return all;
}

// A GPU's graphs are replayed a fixed number of times, and no CPU thread computes.
void check_gpu_flags(const Options& options) {
  const auto unused = [&](const char* flag, bool given) {
    require(!given, "bench: ", options.device, " does not use ", flag);
  };
  unused("--threads", options.threads.has_value());
  unused("--seconds", options.seconds.has_value());
}

}  // namespace

Row make_row(const Options& options, const Device& device, std::string op, Shape shape, double us) {
  Row row;
  row.op = std::move(op);
  row.device = options.device;
  row.threads = device.info().compute_units;
  row.shape = std::move(shape);
  row.median_us = us;
  return row;
}

std::array<double, 2> in_turns(std::span<const Graph> own, std::span<const Graph> other,
                               const Options& options) {
  const auto times =
      medians_us({[&](uint64_t round) { own[round % own.size()].replay().wait(); },
                  [&](uint64_t round) { other[round % other.size()].replay().wait(); }},
                 options.seconds_per_row());
  return {times[0], times[1]};
}

bool selects(const Options& options, std::string_view name) {
  const auto has = [&](std::string_view text) {
    return text.find(options.filter) != std::string_view::npos;
  };
  if (name == "serving" && options.attention.tokens.has_value() && has("attention")) return false;
  return has(name);
}

void check(const Options& options) {
  const std::vector<std::string> all = names(options);
  bool any = false;
  for (const std::string& name : all) any = any || selects(options, name);
  if (!any) refuse_name("bench: nothing on " + options.device + " is called", options.filter, all);
  if (!on_cpu(options)) check_gpu_flags(options);
  const bool attention = selects(options, "attention"), serving = selects(options, "serving");
  const auto only = [&](const char* names, const std::string& flag) {
    require(flag.empty(), "bench: only ", names, " uses ", flag, ", and \"", options.filter,
            "\" does not measure it");
  };
  if (!attention && !serving) only("attention or serving", options.attention.first_flag());
  if (!serving) only("serving", options.serving.first_flag());
  if (attention)
    on_cpu(options) ? cpu_attention_runs(options.attention) : gpu_attention_runs(options.attention);
  if (serving) serving_runs(options.attention, options.serving, !on_cpu(options));
}

std::vector<Row> run(const Options& options, const Progress& progress) {
  check(options);
  if (!on_cpu(options)) return run_gpu(options, progress);
  std::vector<Row> rows;
  for (const Suite& suite : kSuites) {
    if (!selects(options, suite.name)) continue;
    for (Row& row : suite.run(options, progress)) rows.push_back(std::move(row));
  }
  return rows;
}

}  // namespace gyre::bench
