#include "bench.h"

#include "did_you_mean.h"
#include "runtime/require.h"

namespace gyre::bench {
namespace {

struct Suite {
  const char* name;
  std::vector<Row> (*run)(const Options&, const Progress&);
};

// A new op's benchmark is a row here.
constexpr Suite kSuites[] = {
    {"runtime", run_runtime},         {"kv_copy", run_kv_copy},     {"rope", run_rope},
    {"kv_quantize", run_kv_quantize}, {"attention", run_attention}, {"kv_cache", run_kv_cache},
};

bool on_cpu(const Options& options) { return options.device == "cpu"; }

std::vector<std::string> names(const Options& options) {
  if (!on_cpu(options)) return {"kv_copy", "rope", "kv_quantize", "attention", "kv_cache step"};
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

bool selects(const Options& options, std::string_view name) {
  return name.find(options.filter) != std::string_view::npos;
}

void check(const Options& options) {
  const std::vector<std::string> all = names(options);
  bool any = false;
  for (const std::string& name : all) any = any || selects(options, name);
  if (!any) refuse_name("bench: nothing on " + options.device + " is called", options.filter, all);
  if (!on_cpu(options)) check_gpu_flags(options);
  const std::string flag = options.attention.first_flag();
  if (selects(options, "attention")) {
    on_cpu(options) ? cpu_attention_runs(options.attention) : gpu_attention_runs(options.attention);
  } else {
    require(flag.empty(), "bench: only attention uses ", flag, ", and \"", options.filter,
            "\" does not measure attention");
  }
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
