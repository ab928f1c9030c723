#pragma once
// `gyre compare`: what each cache format costs and gives for one model on this machine.

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "format_pair.h"
#include "model_shapes.h"

namespace gyre::bench {

struct CompareOptions {
  ModelShape shape;
  std::string device = "cpu";
  std::optional<uint32_t> threads;  // CPU only; 0: the device's own choice
  std::vector<uint64_t> contexts = {1024, 4096, 16384};
  std::vector<FormatPair> formats;  // speeds are against the first; empty: the usual six
  uint64_t tail = 0;                // newest tokens that compressed formats keep in f16
  double seconds = 0.4;             // for each format at each context
};

// One format at one context.
struct CompareEntry {
  FormatPair formats;
  uint64_t context = 0;
  double bits = 0;  // per coordinate of the full layers, scales included, mean of K and V
  double bytes_per_token = 0;    // by which the model's cache grows: its full layers
  uint64_t cache_bytes = 0;      // of the model at this context, rings of window layers included
  double step_us = 0;            // median of one decode step of one full layer
  double window_us = 0;          // of one window layer; 0: the model has none
  double model_us = 0;           // of all layers: append and attend, no matrix products
  double tokens_per_second = 0;  // 1 / model_us
  double speedup = 0;            // against the first format at this context
  double read_gbps = 0;          // what a step reads of the layer's cache / step_us
  double limit_gbps = 0;         // what the machine reads, in turns with the steps
  double fraction = 0;           // read_gbps / limit_gbps
  double nmse = 0;               // of the output, against double precision over what was appended
};

struct CompareReport {
  ModelShape shape;
  std::string device;
  std::string description;  // of the machine
  uint32_t threads = 0;
  uint64_t tail = 0;
  std::vector<CompareEntry> entries;  // context by context, formats in the order given
};

// Told what is being done, and how much of the whole is behind (0 to 1).
using CompareProgress = std::function<void(const std::string& what, double done)>;

std::vector<FormatPair> usual_formats();

// Throws gyre::Error for what compare() would refuse, as far as the numbers tell.
void check(const CompareOptions& options);

CompareReport compare(const CompareOptions& options, const CompareProgress& progress);

}  // namespace gyre::bench
