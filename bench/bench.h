#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "attention_runs.h"
#include "gyre/device.h"
#include "gyre/graph.h"
#include "machine_kernels.h"
#include "serving_runs.h"

namespace gyre::bench {

// As far as given: a flag that the device or the chosen benchmarks do not use is refused.
struct Options {
  std::string filter;  // benchmarks whose name contains it; empty runs all
  std::string device = "cpu";
  std::optional<uint32_t> threads;  // CPU only; 0: the device's own choice
  std::optional<double> seconds;    // CPU only; time spent on each row
  AttentionChoice attention;
  ServingChoice serving;

  uint32_t cpu_threads() const { return threads.value_or(0); }
  double seconds_per_row() const { return seconds.value_or(0.4); }
};

using Field = std::variant<uint64_t, double, std::string>;
using Shape = std::vector<std::pair<std::string, Field>>;

// One measured row. What does not apply (bytes of a latency, say) stays 0.
struct Row {
  std::string op, device;
  uint32_t threads = 0;
  Shape shape;
  double median_us = 0;
  uint64_t bytes = 0;     // read and written
  double gbps = 0;        // bytes / median
  double limit_gbps = 0;  // what the machine did in the same run, interleaved
  double fraction = 0;    // gbps / limit_gbps; for latencies median / limit_us
  double limit_us = 0;    // for latencies: the figure to stay under
  std::string against;    // what the row was compared with, taken in turns; empty: the limit
  double against_us = 0;  // its median
  double speedup = 0;     // against_us / median_us

  void set_against(std::string what, double us) {
    against = std::move(what);
    against_us = us;
    speedup = us / median_us;
  }
  void set_limit(uint64_t moved, double gbps_of_limit) {
    bytes = moved;
    gbps = static_cast<double>(moved) / median_us / 1e3;
    limit_gbps = gbps_of_limit;
    fraction = gbps_of_limit > 0 ? gbps / gbps_of_limit : 0;
  }
};

Row make_row(const Options& options, const Device& device, std::string op, Shape shape, double us);

// Replays of both in turns; round by round another of each, so that memory is not in a cache.
std::array<double, 2> in_turns(std::span<const Graph> own, std::span<const Graph> other,
                               const Options& options);

// A benchmark: rows of one op. `progress` is told each row's name before it is measured.
struct Progress {
  std::function<void(const std::string&)> begin;
  std::function<void(const Row&)> done;
};

// A row for each case, on the CPU.
template <class Cases, class Text, class Measure>
std::vector<Row> measure_cases(const Options& options, const Progress& progress, const Cases& cases,
                               const Text& text, const Measure& measure) {
  std::vector<Row> rows;
  const Device device = open_cpu(options.cpu_threads());
  for (const auto& c : cases) {
    progress.begin(text(c));
    rows.push_back(measure(device, c, options));
    progress.done(rows.back());
  }
  return rows;
}

std::vector<Row> run_attention(const Options& options, const Progress& progress);
std::vector<Row> run_runtime(const Options& options, const Progress& progress);
std::vector<Row> run_kv_cache(const Options& options, const Progress& progress);
std::vector<Row> run_cpu_kv_calibration(const Options& options, const Progress& progress);
std::vector<Row> run_kv_calibration(const Device& device, const Options& options,
                                    const Progress& progress);
std::vector<Row> run_kv_copy(const Options& options, const Progress& progress);
std::vector<Row> run_kv_quantize(const Options& options, const Progress& progress);
std::vector<Row> run_serving(const Options& options, const Progress& progress);
std::vector<Row> run_rope(const Options& options, const Progress& progress);
// On a device that is not the CPU: benchmarks whose name the filter is in, and copy, their limit.
std::vector<Row> run_gpu(const Options& options, const Progress& progress);

// Whether the filter lets a benchmark through; serving has one token for each sequence and stands
// back where several are asked for.
bool selects(const Options& options, std::string_view name);

// Throws gyre::Error for what run() would refuse, as far as the options tell: no device is opened.
void check(const Options& options);

// Everything the filter lets through.
std::vector<Row> run(const Options& options, const Progress& progress);

}  // namespace gyre::bench
