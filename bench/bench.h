#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

namespace gyre::bench {

// What `gyre bench attention` measures; heads 0: a list of common shapes.
struct AttentionChoice {
  uint64_t heads = 0;
  uint64_t kv_heads = 8;
  uint64_t head_dim = 128;
  uint64_t tokens = 1;
  std::vector<uint64_t> contexts = {1024, 16384};
  std::vector<std::string> k = {"f16", "tq8", "tq4", "tq3", "tq8"};
  std::vector<std::string> v = {"f16", "tq8", "tq4", "tq3", "tq4"};
};

struct Options {
  std::string filter;  // rows whose "op case" contains it; empty runs all
  std::string device = "cpu";
  uint32_t threads = 0;  // 0: the device's own choice
  double seconds_per_row = 0.4;
  AttentionChoice attention;
};

using Field = std::variant<uint64_t, double, std::string>;

// One measured row. What does not apply (bytes of a latency, say) stays 0.
struct Row {
  std::string op;
  std::string device;
  uint32_t threads = 0;
  std::vector<std::pair<std::string, Field>> shape;
  double median_us = 0;
  uint64_t bytes = 0;     // read and written
  double gbps = 0;        // bytes / median
  double limit_gbps = 0;  // what the machine did in the same run, interleaved
  double fraction = 0;    // gbps / limit_gbps; for latencies median / limit_us
  double limit_us = 0;    // for latencies: the figure to stay under
  std::string against;    // what the row was compared with, taken in turns; empty: the limit
  double against_us = 0;  // its median
  double speedup = 0;     // against_us / median_us
};

// A benchmark: rows of one op. `progress` is told each row's name before it is measured.
struct Progress {
  std::function<void(const std::string&)> begin;
  std::function<void(const Row&)> done;
};

std::vector<Row> run_attention(const Options& options, const Progress& progress);
std::vector<Row> run_runtime(const Options& options, const Progress& progress);
std::vector<Row> run_kv_cache(const Options& options, const Progress& progress);
std::vector<Row> run_kv_copy(const Options& options, const Progress& progress);
std::vector<Row> run_kv_quantize(const Options& options, const Progress& progress);
std::vector<Row> run_rope(const Options& options, const Progress& progress);
// On a device that is not the CPU: ops whose name the filter is in, and copy, their limit.
std::vector<Row> run_gpu(const Options& options, const Progress& progress);

// Everything the filter lets through.
std::vector<Row> run(const Options& options, const Progress& progress);

}  // namespace gyre::bench
