#pragma once
// A CPU device whose table has the CUDA attention kernels in place of its own, run on the host, and
// checks against double precision.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <limits>
#include <map>
#include <tuple>
#include <utility>
#include <vector>

#include "attention/attention_fixture.h"
#include "attention/attention_small.h"
#include "attention_host.h"
#include "cpu/device.h"
#include "cuda/attention/planner.h"
#include "cuda/kernels/attention/decode_layout.cuh"

namespace gyre::test {

constexpr cuda::CudaLimits kLarge{132, 227 << 10, 228 << 10, 90},
    kSmall{84, 99 << 10, 100 << 10, 86};
inline cuda::CudaLimits limits = kLarge;
// Calls of attention_decode; those as clusters and as pairs.
inline uint32_t decode_calls = 0, cluster_calls = 0, pair_calls = 0;
// Whether attention_many_rows is in the table, and how often it ran.
inline bool many_rows = false;
inline uint32_t many_rows_calls = 0;

inline void launch(HostKernel kernel, const cuda::Launch& shape, const void* params,
                   const uint64_t* args) {
  kernel(params, args, {shape.grid, shape.block, shape.shared_bytes});
}

inline void run_attention(const void* params, const uint64_t* args, uint32_t, uint32_t) noexcept {
  const auto& p = *static_cast<const abi::AttentionParams*>(params);
  launch(host_attention(p.k.format, p.v.format), cuda::launch_attention(params, 0, limits), params,
         args);
}

template <uint32_t kRows, uint32_t kCluster>
void run_decode(const void* params, const uint64_t* args, uint32_t, uint32_t) noexcept {
  const auto& p = *static_cast<const abi::AttentionParams*>(params);
  abi::AttentionDecodeSpec spec = abi::attention_decode_spec(
      p.k.format, p.v.format, static_cast<uint32_t>(p.k.head_dim), kRows, kCluster);
  if (p.k.head_dim != p.v.head_dim) spec.value_dim16 = static_cast<uint8_t>(p.v.head_dim / 16);
  ++decode_calls;
  if (kCluster == cuda::kDecodeCluster) ++cluster_calls;
  if (kCluster == cuda::kDecodePair) ++pair_calls;
  launch(host_attention_decode(p.k.format, p.v.format, p.k.head_dim, p.v.head_dim, kRows, kCluster),
         cuda::launch_attention_decode(params, spec_key(spec), limits), params, args);
}
template <uint32_t kCluster>
cpu::TaskFn decode_of(uint32_t rows) {
  if (rows <= 8) return rows == 4 ? run_decode<4, kCluster> : run_decode<8, kCluster>;
  return rows == 12 ? run_decode<12, kCluster> : run_decode<16, kCluster>;
}

template <uint32_t kOut>
void run_merge(const void* params, const uint64_t* args, uint32_t, uint32_t) noexcept {
  launch(host_attention_merge(kOut), cuda::launch_attention_merge(params, 0, limits), params, args);
}

inline cpu::TaskFn select_attention(uint64_t spec) {
  const auto types = spec_from_key<abi::AttentionSpec>(spec);
  return host_attention(types.k_format, types.v_format) != nullptr ? run_attention : nullptr;
}

// What fits, of what was compiled.
inline bool has_decode(uint64_t spec, const cuda::CudaLimits& gpu) {
  const auto s = spec_from_key<abi::AttentionDecodeSpec>(spec);
  return host_attention_decode(s.k_format, s.v_format, s.head_dim, abi::decode_value_dim(s), s.rows,
                               s.cluster) != nullptr &&
         cuda::fits_attention_decode(spec, gpu);
}

inline HostKernel host_kernel(const abi::AttentionRowsSpec& s) {
  return host_attention_many_rows(s.k_format, s.v_format, s.k_dim, s.v_dim, s.gpu);
}
inline bool has_many_rows(uint64_t spec, const cuda::CudaLimits& gpu) {
  return many_rows && host_kernel(spec_from_key<abi::AttentionRowsSpec>(spec)) != nullptr &&
         cuda::fits_attention_many_rows(spec, gpu);
}
template <uint32_t kGpu>
void run_many_rows(const void* params, const uint64_t* args, uint32_t, uint32_t) noexcept {
  const auto& p = *static_cast<const abi::AttentionParams*>(params);
  const abi::AttentionRowsSpec spec =
      abi::attention_rows_spec(p.k.format, p.v.format, p.k.head_dim, p.v.head_dim, kGpu);
  ++many_rows_calls;
  launch(host_kernel(spec), cuda::launch_attention_many_rows(params, spec_key(spec), limits),
         params, args);
}
inline cpu::TaskFn select_many_rows(uint64_t spec) {
  if (!has_many_rows(spec, limits)) return nullptr;
  constexpr cpu::TaskFn kOfGpu[] = {run_many_rows<0>, run_many_rows<1>, run_many_rows<2>,
                                    run_many_rows<3>};
  return kOfGpu[spec_from_key<abi::AttentionRowsSpec>(spec).gpu];
}

// The GPU's planner; the device's threads stand for multiprocessors.
inline bool plan_on_host(const void* problem, const DeviceInfo& device, void* plan) {
  cuda::CudaLimits gpu = limits;
  gpu.multiprocessors = device.compute_units;
  *static_cast<abi::AttentionPlan*>(plan) = cuda::plan_attention(
      *static_cast<const abi::AttentionProblem*>(problem), gpu, has_decode, has_many_rows);
  return true;
}

inline cpu::TaskFn select_decode(uint64_t spec) {
  const auto s = spec_from_key<abi::AttentionDecodeSpec>(spec);
  if (!has_decode(spec, limits)) return nullptr;
  if (s.cluster == 1) return decode_of<1>(s.rows);
  return s.cluster == cuda::kDecodePair ? decode_of<cuda::kDecodePair>(s.rows)
                                        : decode_of<cuda::kDecodeCluster>(s.rows);
}

inline cpu::TaskFn select_merge(uint64_t spec) {
  const uint32_t out = spec_from_key<abi::AttentionMergeSpec>(spec).out_dtype;
  return out == 0 ? run_merge<0> : (out == 1 ? run_merge<1> : run_merge<2>);
}

inline uint32_t one_task(const void*, uint64_t) { return 1; }

inline std::vector<cpu::CpuKernel> make_table() {
  const auto rows = cpu::kernel_table();
  std::vector<cpu::CpuKernel> table(rows.begin(), rows.end());
  for (cpu::CpuKernel& row : table) {
    if (row.info == &kAttention.info)
      row = {&kAttention.info, select_attention, one_task, cuda::name_attention, plan_on_host};
    if (row.info == &kAttentionMerge.info) row.select = select_merge, row.tasks = one_task;
  }
  table.push_back({&kAttentionDecode.info, select_decode, one_task, cuda::name_attention_decode});
  table.push_back(
      {&kAttentionManyRows.info, select_many_rows, one_task, cuda::name_attention_many_rows});
  return table;
}

// What fits is found out once for each device: one for each size of shared memory.
inline Device host_device(uint32_t threads = 1) {
  static const std::vector<cpu::CpuKernel> kTable = make_table();
  static std::map<std::tuple<uint32_t, uint32_t, bool>, Device> devices;
  const auto key = std::make_tuple(limits.shared_bytes_per_block, threads, many_rows);
  return devices.try_emplace(key, device_of(cpu::make_device({.threads = threads}, kTable)))
      .first->second;
}

// Queries over the keys and values of one KV head, one token of them.
inline AttentionInputs one_head(const Device& d, KvFormat format, const std::vector<float>& q,
                                const std::vector<float>& k, const std::vector<float>& v,
                                uint64_t dim) {
  const uint64_t heads = q.size() / dim;
  AttentionInputs in;
  in.q = tensor_of(d, q, {1, heads, dim});
  in.k_cache = cache_of(d, format, KvRole::k, k, {1, dim});
  in.v_cache = cache_of(d, format, KvRole::v, v, {1, dim});
  in.out = d.tensor(DType::f32, {1, heads, dim});
  return in;
}
inline std::vector<float> attended(const Device& d, const AttentionInputs& in,
                                   const AttentionOptions& options) {
  Encoder encoder(d);
  attention(encoder, in, options);
  encoder.submit().wait();
  return floats_of(in.out);
}

inline void expect_holds(const AttentionCase& c) { EXPECT_TRUE(attention_holds(host_device(), c)); }

inline void expect_close(const AttentionCase& c, uint32_t threads = 1) {
  EXPECT_TRUE(attention_holds(host_device(threads), c));
}

inline void expect_decoded(const AttentionCase& c, uint32_t threads = 1) {
  const uint32_t before = decode_calls;
  expect_close(c, threads);
  EXPECT_EQ(decode_calls, before + 1) << c.text();
}

// A key with an infinite coordinate counts nothing in rows where its score is below all others, and
// makes those where it is above, or none, NaN: as on the CPU. The rows' coordinate there has two
// 16-bit parts, one, none that f16 holds beside the others, or is 0; levels, of which a key's scale
// is infinite, meet it rounded.
inline constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();
inline void expect_infinite_key(KvFormat format, float coordinate, uint64_t dim,
                                uint64_t rows = 8) {
  constexpr uint64_t kKeys = 100, kAt = 3;
  constexpr std::array kQueries = {0.3f, -0.3f, 0.5f, -0.5f, 1e-13f, -1e-13f, 0.7f, 0.0f};
  std::vector<float> queries = gaussian_rows(rows, dim, 3), keys = gaussian_rows(kKeys, dim, 1);
  for (uint64_t i = 0; i < rows && std::isinf(coordinate); ++i)
    queries[i * dim + kAt] = kQueries[i % kQueries.size()];
  keys[50 * dim + kAt] = coordinate;
  const auto attend_on = [&](const Device& d) {
    AttentionInputs in = one_head(d, format, queries, keys, gaussian_rows(kKeys, dim, 2), dim);
    in.lse = d.tensor(DType::f32, {1, rows});
    const std::vector<float> values = attended(d, in, {.length = kKeys, .scale = 0.1f});
    return std::make_pair(values, floats_of(in.lse));
  };
  const auto [out, lse] = attend_on(host_device());
  const auto [wanted, wanted_lse] = attend_on(cpu_device(1));
  std::vector<double> finite, wanted_finite;
  for (uint64_t i = 0; i < rows; ++i) {
    EXPECT_EQ(std::isnan(lse[i]), std::isnan(wanted_lse[i]))
        << name(format) << " head_dim " << dim << " row " << i;
    if (std::isnan(wanted_lse[i])) continue;
    for (uint64_t c = i * dim; c < (i + 1) * dim; ++c)
      finite.push_back(out[c]), wanted_finite.push_back(wanted[c]);
  }
  EXPECT_FALSE(finite.empty());
  EXPECT_LE(nmse(finite, wanted_finite), 1e-5) << name(format) << " head_dim " << dim;
}

// Everything that attention gives over a cache that grows by these numbers of tokens; a number
// above 100, which would take long, is only appended.
inline std::vector<float> attended(const Device& d, const KvCacheOptions& config, uint64_t heads,
                                   std::initializer_list<uint64_t> steps) {
  const uint64_t kv_heads = config.kv_heads, dim = config.head_dim;
  KvCache cache(d, config);
  std::vector<float> all;
  for (const uint64_t tokens : steps) {
    const auto seed = static_cast<uint32_t>(tokens);
    const auto rows = [&](uint64_t count, uint32_t more) {
      return tensor_of(d, gaussian_rows(tokens * count, dim, seed + more), {tokens, count, dim});
    };
    const Tensor k = rows(kv_heads, 0), v = rows(kv_heads, 50), q = rows(heads, 99);
    const Tensor out = d.tensor(DType::f32, {tokens, heads, dim});
    Encoder encoder(d);
    cache.begin_step(encoder, tokens);
    for (uint64_t layer = 0; layer < config.layers.size(); ++layer) {
      cache.append(encoder, layer, k, v);
      if (tokens <= 100) cache.attend(encoder, layer, {.q = q, .out = out}, {.scale = 0.2f});
      encoder.submit().wait();
      if (tokens > 100) continue;
      const std::vector<float> values = floats_of(out);
      all.insert(all.end(), values.begin(), values.end());
    }
  }
  return all;
}

inline void expect_attended(const Device& d, const KvCacheOptions& config, uint64_t heads,
                            std::initializer_list<uint64_t> steps) {
  const std::vector<float> wanted = attended(cpu_device(1), config, heads, steps);
  const std::vector<float> got = attended(d, config, heads, steps);
  EXPECT_LE(nmse({got.begin(), got.end()}, {wanted.begin(), wanted.end()}), 1e-6);
}

}  // namespace gyre::test
