#include "bench.h"

#include "gyre/error.h"

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

}  // namespace

std::vector<Row> run(const Options& options, const Progress& progress) {
  if (options.device != "cpu") return run_gpu(options, progress);
  std::vector<Row> rows;
  std::string known;
  bool found = false;
  for (const Suite& suite : kSuites) {
    known += std::string(known.empty() ? "" : ", ") + suite.name;
    if (std::string(suite.name).find(options.filter) == std::string::npos) continue;
    found = true;
    for (Row& row : suite.run(options, progress)) rows.push_back(std::move(row));
  }
  if (!found) {
    throw Error(ErrorCode::invalid_argument,
                "bench: nothing matches \"" + options.filter + "\"; there are " + known);
  }
  return rows;
}

}  // namespace gyre::bench
