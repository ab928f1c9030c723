#include <array>
#include <span>
#include <vector>

#include "gyre/quantize.h"
#include "ops/kv_calibration.h"
#include "ops/kv_layout.h"
#include "ops/kv_range.h"
#include "ops/table.h"
#include "ops/writers.h"
#include "runtime/layout.h"
#include "runtime/recorder.h"
#include "runtime/require.h"

namespace gyre {
namespace {

abi::KvDequantizeSpec dequantize_spec(DType out, KvFormat format) {
  return spec_from_key<abi::KvDequantizeSpec>(static_cast<uint64_t>(out) |
                                              static_cast<uint64_t>(format) << 8);
}

// One of K and V, with the names its messages use.
struct Stream {
  const char* name;
  const char* cache_name;
  KvRole role;
  const Tensor& source;
  const KvBuffer& cache;
  const KvCalibration& calibration;

  bool given() const { return source.defined(); }
};

void check_stream(const Stream& s) {
  const bool has_cache = s.cache.codes.defined() || s.cache.scales.defined();
  require(s.given() == has_cache, "kv_quantize: ", s.name, " and ", s.cache_name,
          " go together, only ", s.given() ? s.name : s.cache_name, " is defined");
  require(s.given() || !s.calibration.defined(), "kv_quantize: ", s.name,
          "_calibration is defined, ", s.name, " is not");
  if (!s.given()) return;
  check_compressed("kv_quantize", s.cache_name, s.cache);
  check_kv_buffer("kv_quantize", s.cache_name, s.cache);
  check_kv_rows("kv_quantize", s.name, s.source, s.cache.shape);
  require(s.cache.shape.role == s.role, "kv_quantize: ", s.cache_name, " must have role ",
          s.role == KvRole::k ? "k, got v" : "v, got k");
  check_calibration("kv_quantize", s.name, s.calibration, s.cache.shape.format,
                    s.cache.shape.kv_heads, s.cache.shape.head_dim);
}

void check_pair(const KvQuantizeInputs& in) {
  check_rows_pair("kv_quantize", in.k, in.v);
  require(in.v_cache.shape.capacity == in.k_cache.shape.capacity,
          "kv_quantize: v_cache must have the capacity of k_cache: ", in.k_cache.shape.capacity,
          ", got ", in.v_cache.shape.capacity);
  require(in.v_cache.shape.kv_heads == in.k_cache.shape.kv_heads,
          "kv_quantize: v_cache must have the kv_heads of k_cache: ", in.k_cache.shape.kv_heads,
          ", got ", in.v_cache.shape.kv_heads);
}

// Outputs share no memory with anything else.
void check_overlap(const KvQuantizeInputs& in) {
  struct Part {
    const Tensor& tensor;
    const char* name;
  };
  const std::array<Part, 4> written = {{{in.k_cache.codes, "codes of k_cache"},
                                        {in.k_cache.scales, "scales of k_cache"},
                                        {in.v_cache.codes, "codes of v_cache"},
                                        {in.v_cache.scales, "scales of v_cache"}}};
  const auto disjoint = [](const Part& a, const Part& b) {
    require(!a.tensor.defined() || !b.tensor.defined() || !may_overlap(a.tensor, b.tensor),
            "kv_quantize: ", a.name, " and ", b.name, " share memory");
  };
  for (size_t i = 0; i < written.size(); ++i) {
    disjoint({in.k, "k"}, written[i]);
    disjoint({in.v, "v"}, written[i]);
    for (size_t j = i + 1; j < written.size(); ++j) disjoint(written[i], written[j]);
  }
}

// What the streams share is that of `first`.
abi::WriteParams make_params(std::span<const Stream, 2> streams, const Stream& first,
                             const KvSlotRange& range, const WriterSources& sources) {
  abi::WriteParams params{};
  params.tokens = range.tokens;
  params.heads = first.cache.shape.kv_heads;
  params.first_stream = streams[0].given() ? 0 : 1;
  params.where = abi::kWriteRange;
  params.run = abi::slot_run(0, range.tokens, range.first_slot, first.cache.shape.capacity);
  for (uint32_t i = 0; i < 2; ++i) {
    if (!streams[i].given()) continue;
    params.stream[i] = write_stream(sources.of[i], kv_cache_layout(streams[i].cache));
    ++params.streams;
  }
  return params;
}

}  // namespace

std::string kv_quantize_shape(const void* params) {
  const auto& p = *static_cast<const abi::WriteParams*>(params);
  return join("tokens=", p.tokens, " heads=", p.heads,
              " head_dim=", p.stream[p.first_stream].cache.head_dim, " streams=", p.streams,
              " slot=", p.run.first_slot, " capacity=", p.run.capacity);
}

std::string kv_dequantize_shape(const void* params) {
  const auto& p = *static_cast<const abi::KvDequantizeParams*>(params);
  return join("tokens=", p.tokens, " heads=", p.heads, " head_dim=", p.cache.head_dim,
              " slot=", p.first_slot);
}

namespace {

const std::vector<KvFormat>& compressed_formats() {
  static const auto& kCompressed = *new std::vector<KvFormat>([] {
    std::vector<KvFormat> formats;
    for (const KvFormat format : kv_formats()) {
      if (describe(format).compressed) formats.push_back(format);
    }
    return formats;
  }());
  return kCompressed;
}

}  // namespace

std::span<const uint64_t> kv_quantize_specs() {
  static const auto& kSpecs = *new std::vector<uint64_t>([] {
    std::vector<uint64_t> specs = write_specs({.formats = compressed_formats()});
    for (const DType source : kFloats) {
      for (const KvFormat format : compressed_formats()) {
        const auto alone = static_cast<uint64_t>(format);
        specs.push_back(spec_key(write_spec({.source = source, .k_format = alone})));
        specs.push_back(spec_key(write_spec({.source = source, .v_format = alone})));
      }
    }
    return specs;
  }());
  return kSpecs;
}

std::span<const uint64_t> kv_dequantize_specs() {
  return spec_list([](auto add) {
    for (const DType out : kFloats) {
      for (const KvFormat format : compressed_formats()) add(dequantize_spec(out, format));
    }
  });
}

bool supports(const Device& device, const KvQuantizeTypes& types) try {
  require(impl_of(device) != nullptr, "supports: the device was moved from");
  const auto format = static_cast<uint32_t>(types.format);
  if (!abi::kv_is_native(format) && !abi::kv_is_mlx_native(format)) return false;
  const auto spec = write_spec({.source = types.source, .k_format = format});
  return impl_of(device)->has(kKvQuantize.info, spec_key(spec));
} catch (const std::bad_alloc&) {
  out_of_memory("supports");
}

void kv_quantize(Encoder& encoder, const KvQuantizeInputs& in, const KvRange& options) try {
  Recording recording(encoder, "kv_quantize");
  const Stream streams[2] = {{"k", "k_cache", KvRole::k, in.k, in.k_cache, in.k_calibration},
                             {"v", "v_cache", KvRole::v, in.v, in.v_cache, in.v_calibration}};
  for (const Stream& s : streams) check_stream(s);
  const bool has_k = streams[0].given(), has_v = streams[1].given();
  require(has_k || has_v, "kv_quantize: k, v or both must be defined, got neither");
  if (has_k && has_v) check_pair(in);
  const Stream& first = streams[has_k ? 0 : 1];
  const KvShape& shape = first.cache.shape;
  if (shape.kv_heads == 0) return;
  const KvSlotRange range =
      checked_kv_range("kv_quantize", first.name, first.source.shape(0), shape.capacity, options);
  if (range.tokens == 0) return;
  check_overlap(in);
  Tensor source[2];
  uint64_t format[2] = {};  // 0: not given; the f32 that it stands for is no compressed format
  for (uint32_t i = 0; i < 2; ++i) {
    if (!streams[i].given()) continue;
    source[i] = streams[i].source.slice(0, range.first_token, range.tokens);
    format[i] = static_cast<uint64_t>(streams[i].cache.shape.format);
  }
  const WriterSources rows = encode_rows(recording, encoder.device(),
                                         {source[0], in.k_calibration, in.k_cache.shape.format},
                                         {source[1], in.v_calibration, in.v_cache.shape.format});
  recording.dispatch(kKvQuantize,
                     write_spec({.source = first.source.dtype(),
                                 .k_format = format[0],
                                 .v_format = format[1],
                                 .calibrated = rows.calibrated}),
                     make_params(streams, first, range, rows),
                     {nullptr, &rows.of[0], &in.k_cache.codes, &in.k_cache.scales, nullptr,
                      &rows.of[1], &in.v_cache.codes, &in.v_cache.scales, nullptr});
  recording.commit();
} catch (const std::bad_alloc&) {
  out_of_memory("kv_quantize");
}

void kv_dequantize(Encoder& encoder, const KvDequantizeInputs& in,
                   const KvDequantizeOptions& options) try {
  Recording recording(encoder, "kv_dequantize");
  check_compressed("kv_dequantize", "cache", in.cache);
  check_kv_buffer("kv_dequantize", "cache", in.cache);
  check_kv_rows("kv_dequantize", "out", in.out, in.cache.shape);
  require(in.out.is_injective(), "kv_dequantize: strides ", in.out.strides(),
          " make elements of out share memory");
  require(options.domain <= KvDomain::rotated,
          "kv_dequantize: ", static_cast<uint32_t>(options.domain), " is not a domain");
  const uint64_t tokens = in.out.shape(0);
  const uint64_t capacity = in.cache.shape.capacity;
  require(options.first_slot <= capacity && tokens <= capacity - options.first_slot,
          "kv_dequantize: a cache of ", capacity, " slots does not have ", tokens, " from slot ",
          options.first_slot);
  require(!may_overlap(in.out, in.cache.codes),
          "kv_dequantize: out and codes of cache share memory");
  require(!may_overlap(in.out, in.cache.scales),
          "kv_dequantize: out and scales of cache share memory");
  if (in.out.elements() == 0) return;
  abi::KvDequantizeParams params{};
  params.tokens = tokens;
  params.heads = in.cache.shape.kv_heads;
  params.first_slot = options.first_slot;
  params.out_token_stride = in.out.stride(0) * size_bytes(in.out.dtype());
  params.out_head_stride = in.out.stride(1) * size_bytes(in.out.dtype());
  params.cache = kv_cache_layout(in.cache);
  params.rotated = options.domain == KvDomain::rotated ? 1 : 0;
  recording.dispatch(kKvDequantize, dequantize_spec(in.out.dtype(), in.cache.shape.format), params,
                     {&in.cache.codes, &in.cache.scales, &in.out});
  recording.commit();
} catch (const std::bad_alloc&) {
  out_of_memory("kv_dequantize");
}

}  // namespace gyre
