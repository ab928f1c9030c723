#include "variant_classes.h"

#include <array>
#include <bit>
#include <cstring>

#include "abi/kernels.h"
#include "format_classes.h"
#include "runtime/require.h"

namespace gyre::test {
namespace {

using Classes = std::vector<std::string>;

// 0 in a spec that has no such side is not a format.
std::string_view format_name(uint32_t format) { return name(static_cast<KvFormat>(format)); }
std::string_view class_name(uint32_t format) {
  return name(class_of(static_cast<KvFormat>(format)));
}
std::string_view dtype_name(uint32_t dtype) { return name(static_cast<DType>(dtype)); }

std::string_view reduction_name(Reduction reduction) {
  constexpr std::string_view kNames[] = {"none", "states", "in_kernel", "cluster"};
  return kNames[static_cast<size_t>(reduction)];
}

Classes of_rope(uint64_t key) {
  const auto s = spec_from_key<abi::RopeSpec>(key);
  return {join("rope x=", dtype_name(s.x_dtype), " out=", dtype_name(s.out_dtype),
               " pairs=", s.adjacent != 0 ? "adjacent" : "halves", s.norm != 0 ? " norm" : "")};
}

Classes of_quantize(uint64_t key) {
  const auto s = spec_from_key<abi::WriteSpec>(key);
  Classes all = {
      join("kv_quantize source=", dtype_name(s.source_dtype)),
      join("kv_quantize streams=", s.k_format != 0 ? "k" : "", s.v_format != 0 ? "v" : "")};
  if (s.k_format != 0) all.push_back(join("kv_quantize k=", format_name(s.k_format)));
  if (s.v_format != 0) all.push_back(join("kv_quantize v=", format_name(s.v_format)));
  return all;
}

Classes of_append(uint64_t key) {
  const auto s = spec_from_key<abi::WriteSpec>(key);
  return {join("kv_append source=", dtype_name(s.source_dtype)),
          join("kv_append k=", format_name(s.k_format)),
          join("kv_append v=", format_name(s.v_format)),
          join("kv_append k=", class_name(s.k_format), " v=", class_name(s.v_format))};
}

std::string_view rows_name(uint32_t lane_quads) { return lane_quads == 0 ? "many" : "few"; }

Classes of_write(uint64_t key) {
  const auto s = spec_from_key<abi::WriteSpec>(key);
  const std::string_view rows = rows_name(s.lane_quads);
  return {join("kv_write source=", dtype_name(s.source_dtype)),
          join("kv_write slots=", s.slot_bytes == 8 ? "i64" : "i32"),
          join("kv_write lane_quads=", uint32_t{s.lane_quads}),
          join("kv_write k=", format_name(s.k_format), " rows=", rows),
          join("kv_write v=", format_name(s.v_format), " rows=", rows),
          join("kv_write k=", class_name(s.k_format), " v=", class_name(s.v_format))};
}

Classes of_rope_append(uint64_t key) {
  const auto s = spec_from_key<abi::RopeAppendSpec>(key);
  const char* const where = s.slot_bytes == 0 ? "state" : (s.slot_bytes == 8 ? "i64" : "i32");
  const std::string_view rows = rows_name(s.lane_quads);
  return {join("rope_append dtype=", dtype_name(s.dtype),
               " pairs=", s.adjacent != 0 ? "adjacent" : "halves", s.norm != 0 ? " norm" : ""),
          join("rope_append where=", where, " rows=", rows),
          join("rope_append lane_quads=", uint32_t{s.lane_quads}),
          join("rope_append k=", format_name(s.k_format), " rows=", rows),
          join("rope_append v=", format_name(s.v_format), " rows=", rows),
          join("rope_append k=", class_name(s.k_format), " v=", class_name(s.v_format),
               " rows=", rows)};
}

Classes of_attention(uint64_t key, Reduction reduction) {
  const auto s = spec_from_key<abi::AttentionSpec>(key);
  const std::string op =
      join(s.latent != 0 ? "latent " : "", s.paged != 0 ? "paged " : "", "attention");
  if (s.latent != 0) {
    return {join(op, " q=", dtype_name(s.q_dtype)), join(op, " out=", dtype_name(s.out_dtype)),
            join(op, " k=", format_name(s.k_format)), join(op, " v=", class_name(s.v_format))};
  }
  return {join(op, " q=", dtype_name(s.q_dtype)), join(op, " out=", dtype_name(s.out_dtype)),
          join(op, " k=", format_name(s.k_format)), join(op, " v=", format_name(s.v_format)),
          join(op, " k=", class_name(s.k_format), " v=", class_name(s.v_format),
               " reduction=", reduction_name(reduction))};
}

// Where rows and reductions differ, one head dim with several scale blocks stands for all.
Classes of_decode(uint64_t key, Reduction reduction) {
  const auto s = spec_from_key<abi::AttentionDecodeSpec>(key);
  const std::string value_dim = s.value_dim16 == 0 ? "" : join("/", abi::decode_value_dim(s));
  const std::string dim = join(" head_dim=", s.head_dim, value_dim);
  if (s.value_dim16 != 0 || (std::popcount(uint32_t{s.head_dim}) > 1 && s.head_dim != 96)) {
    return {join("attention_decode k=", format_name(s.k_format), dim),
            join("attention_decode v=", format_name(s.v_format), dim)};
  }
  return {join("attention_decode k=", format_name(s.k_format), " v=", format_name(s.v_format)),
          join("attention_decode k=", format_name(s.k_format), dim),
          join("attention_decode v=", format_name(s.v_format), dim),
          join("attention_decode k=", class_name(s.k_format), " v=", class_name(s.v_format), dim,
               " rows=", uint32_t{s.rows}, " blocks=", uint32_t{s.cluster},
               " reduction=", reduction_name(reduction))};
}

Classes of_many_rows(uint64_t key) {
  const auto s = spec_from_key<abi::AttentionRowsSpec>(key);
  const std::string gpu = join(" gpu=", uint32_t{s.gpu});
  return {join("attention_many_rows k=", format_name(s.k_format), gpu),
          join("attention_many_rows v=", format_name(s.v_format), gpu),
          join("attention_many_rows k=", class_name(s.k_format), " v=", class_name(s.v_format),
               " head_dim=", s.k_dim, gpu)};
}

Classes of_latent(uint64_t key) {
  const auto s = spec_from_key<abi::AttentionLatentSpec>(key);
  const std::string part = join(" part=", uint32_t{s.part});
  return {join("attention_latent k=", format_name(s.k_format), part),
          join("attention_latent v=", format_name(s.v_format), part)};
}

// Aligned, as caches are that were allocated.
abi::KvCacheLayout layout_of(KvFormat format, KvRole role, uint32_t head_dim) {
  return {.codes_head_stride = 1 << 20,
          .codes_tile_stride = 1 << 12,
          .scales_head_stride = 1 << 20,
          .scales_tile_stride = 1 << 12,
          .format = static_cast<uint32_t>(format),
          .role = static_cast<uint32_t>(role),
          .head_dim = head_dim,
          .scale_factor = 1};
}

Reduction reduction_of(const abi::AttentionProblem& problem, const abi::AttentionPlan& plan) {
  if (problem.states != 0 || plan.reduce == abi::AttentionReduce::separate)
    return Reduction::states;
  if (plan.reduce == abi::AttentionReduce::none) return Reduction::none;
  return plan.scratch_floats != 0 ? Reduction::in_kernel : Reduction::cluster;
}

void add_planned(const Device& device, const abi::AttentionProblem& problem,
                 std::set<std::string>& all) {
  abi::AttentionPlan plan = abi::attention_default_plan(problem);
  impl_of(device)->plan(kAttention.info, &problem, &plan);
  if (plan.kernel != abi::AttentionKernel::attention_decode) return;
  for (std::string& text :
       variant_classes(kAttentionDecode.info, plan.spec, reduction_of(problem, plan)))
    all.insert(std::move(text));
}

// Who may reduce what a kernel's blocks leave. States of pages are wanted by KvBatch alone.
std::vector<Reduction> reductions_of(const Device& device, const KernelInfo& kernel,
                                     uint64_t spec) {
  if (&kernel != &kAttention.info) return {Reduction::none};
  std::vector<Reduction> all = {Reduction::none};
  const bool paged = spec_from_key<abi::AttentionSpec>(spec).paged != 0;
  if (!paged) all.push_back(Reduction::states);
  abi::AttentionProblem p{};
  p.tokens = p.heads = p.kv_heads = 1;
  p.capacity = p.keys = 1 << 17;
  p.k = p.v = layout_of(KvFormat::f32, KvRole::k, 64);
  if (paged) p.sequences = p.max_query_length = 1, p.page_tokens = 64;
  abi::AttentionPlan plan = abi::attention_default_plan(p);
  impl_of(device)->plan(kernel, &p, &plan);
  const bool here = plan.kernel == abi::AttentionKernel::attention;
  if (here && plan.reduce == abi::AttentionReduce::in_kernel) all.push_back(Reduction::in_kernel);
  return all;
}

// What the planner chooses for caches of every pair of formats: from one block's worth of keys to
// a long context, from one KV head to more than a GPU has multiprocessors.
void add_planned(const Device& device, KvFormat k, KvFormat v, std::set<std::string>& all) {
  constexpr std::array<uint32_t, 2> kDims[] = {
      {48, 48},   {64, 64},   {80, 80},   {96, 96},   {112, 112}, {128, 128},  {160, 160},
      {192, 192}, {192, 128}, {240, 240}, {256, 256}, {512, 512}, {1024, 1024}};
  for (const auto& [k_dim, v_dim] : kDims) {
    if (!stores(k, k_dim) || !stores(v, v_dim)) continue;
    abi::AttentionProblem p{};
    p.k = layout_of(k, KvRole::k, k_dim);
    p.v = layout_of(v, KvRole::v, v_dim);
    p.key_bytes = (uint64_t{k_dim} * describe(k).bits + uint64_t{v_dim} * describe(v).bits) / 8;
    p.tokens = 1;
    for (const uint64_t kv_heads : {1u, 5u, 8u, 16u, 160u}) {
      for (const uint64_t group : {1u, 4u, 5u, 8u, 9u, 12u, 13u, 16u}) {
        p.kv_heads = kv_heads;
        p.heads = kv_heads * group;
        for (const uint64_t keys : {100u, 300u, 500u, 4096u, 131072u}) {
          p.capacity = p.keys = keys;
          for (const uint64_t splits : {0u, 2u}) {  // 2: partial states
            p.splits = splits;
            p.states = splits == 0 ? 0 : 1;
            add_planned(device, p, all);
          }
        }
      }
    }
  }
}

}  // namespace

std::vector<std::string> variant_classes(const KernelInfo& kernel, uint64_t spec,
                                         Reduction reduction) {
  if (&kernel == &kKvCopy.info) {
    const auto s = spec_from_key<abi::KvCopySpec>(spec);
    return {
        join("kv_copy source=", dtype_name(s.source_dtype), " cache=", dtype_name(s.cache_dtype))};
  }
  if (&kernel == &kHadamard.info) {
    const auto s = spec_from_key<abi::HadamardSpec>(spec);
    return {join("hadamard x=", dtype_name(s.x_dtype), " out=", dtype_name(s.out_dtype))};
  }
  if (&kernel == &kKvDequantize.info) {
    const auto s = spec_from_key<abi::KvDequantizeSpec>(spec);
    return {join("kv_dequantize format=", format_name(s.format), " out=", dtype_name(s.out_dtype))};
  }
  if (&kernel == &kAttentionMerge.info) {
    const auto s = spec_from_key<abi::AttentionMergeSpec>(spec);
    return {join("attention_merge out=", dtype_name(s.out_dtype))};
  }
  if (&kernel == &kRope.info) return of_rope(spec);
  if (&kernel == &kKvQuantize.info) return of_quantize(spec);
  if (&kernel == &kKvAppend.info) return of_append(spec);
  if (&kernel == &kKvWrite.info) return of_write(spec);
  if (&kernel == &kRopeAppend.info) return of_rope_append(spec);
  if (&kernel == &kAttention.info) return of_attention(spec, reduction);
  if (&kernel == &kAttentionDecode.info) return of_decode(spec, reduction);
  if (&kernel == &kAttentionManyRows.info) return of_many_rows(spec);
  if (&kernel == &kAttentionLatent.info) return of_latent(spec);
  return {kernel.name};
}

std::vector<std::string> variant_classes(const RecordedCommand& command) {
  Reduction reduction = Reduction::none;
  if (command.kernel == &kAttention.info || command.kernel == &kAttentionDecode.info) {
    abi::AttentionParams params{};
    std::memcpy(&params, command.params.data(), sizeof(params));
    if (params.partial == abi::kAttentionPartial) reduction = Reduction::states;
    if (params.partial == abi::kAttentionMerged) reduction = Reduction::in_kernel;
    if (params.partial == abi::kAttentionStates && params.splits > 1)
      reduction = Reduction::in_kernel;
    if (params.partial == abi::kAttentionWhole && params.splits > 1) reduction = Reduction::cluster;
  }
  return variant_classes(*command.kernel, command.spec, reduction);
}

std::set<std::string> listed_classes(const Device& device) {
  std::set<std::string> all;
  for (const KernelUse& use : impl_of(device)->kernel_uses()) {
    const KernelInfo* const kernel = use.kernel;
    if (kernel == &kAttentionDecode.info) {
      for (const KvFormat k : kv_formats()) {
        for (const KvFormat v : kv_formats()) add_planned(device, k, v, all);
      }
      continue;
    }
    for (const uint64_t spec : impl_of(device)->specs(use)) {
      if (!impl_of(device)->has(*kernel, spec)) continue;
      for (const Reduction reduction : reductions_of(device, *kernel, spec)) {
        for (std::string& text : variant_classes(*kernel, spec, reduction))
          all.insert(std::move(text));
      }
    }
  }
  return all;
}

testing::AssertionResult each_is_launched(const std::set<std::string>& listed,
                                          const std::set<std::string>& launched) {
  std::string wrong;
  for (const std::string& text : listed) {
    if (launched.count(text) == 0) wrong += "no case launched " + text + "\n";
  }
  for (const std::string& text : launched) {
    if (listed.count(text) == 0) wrong += "launched and not listed: " + text + "\n";
  }
  if (wrong.empty()) return testing::AssertionSuccess();
  return testing::AssertionFailure() << wrong;
}

}  // namespace gyre::test
