#pragma once
// Attention problems as numbers: builds the cache (every slot outside the bounds holds NaN), runs
// the op, and computes the reference over the dequantized and over the original keys and values.

#include "attention/attention_reference.h"
#include "attention/attention_tolerance.h"
#include "format_classes.h"
#include "gyre_test.h"
#include "kv_codec/kv_codec_fixture.h"
#include "recorded_commands.h"
#include "str_cat.h"

namespace gyre::test {

struct AttentionCase {
  uint64_t tokens = 1, heads = 4, kv_heads = 1, k_dim = 128;
  uint64_t v_dim = 0;  // 0: k_dim
  uint64_t length = 100;
  uint64_t capacity = 0;  // 0: a few slots more than length
  uint64_t ring_start = 0;
  KvFormat k = KvFormat::f16;
  KvFormat v = KvFormat::f16;
  DType q_dtype = DType::f32, out_dtype = DType::f32;
  bool causal = true;
  uint64_t window = 0;
  float soft_cap = 0;
  float scale_factor = 1;  // of caches in an mlx-native format
  bool sink_logits = false, alibi_slopes = false, tree_mask = false;
  float q_gain = 1;       // 1: logits of unit variance
  uint32_t outliers = 0;  // channels of K and V, evenly spread, ten times as large
  uint32_t seed = 1;
  uint64_t splits = 0;  // 0: attention(); else attention_partial() and attention_merge()

  std::string text() const {
    return str_cat(tokens, "x", heads, "/", kv_heads, "/", k_dim, ",", v_dim, " length ", length,
                   " of ", capacity, " from ", ring_start, " ", k, "/", v, " window ", window,
                   " tree_mask ", tree_mask, " splits ", splits);
  }
};

struct AttentionAnswer {
  RecordedCommand first;  // of the call
  std::vector<double> out, lse;
  reference::AttentionResult decoded;   // over what the cache holds
  reference::AttentionResult original;  // over what was put in
};

class AttentionProblem {
 public:
  AttentionProblem(Device device, AttentionCase c)
      : device_(std::move(device)), c_(c), random_(c.seed) {
    if (c_.v_dim == 0) c_.v_dim = c_.k_dim;
    if (c_.capacity == 0) c_.capacity = c_.length + 5;
    make_inputs();
    fill_caches();
  }

  AttentionInputs inputs;
  AttentionOptions options;
  const Device& device() const { return device_; }
  const AttentionCase& numbers() const { return c_; }
  const reference::AttentionShape& shape() const { return shape_; }
  const reference::AttentionData& data() const { return data_; }  // as it was put in

  void record(Encoder& encoder) const {
    if (c_.splits == 0) return attention(encoder, inputs, options);
    const Tensor partial =
        device_.tensor(DType::f32, attention_partial_shape(c_.splits, inputs.q.shape(), c_.v_dim));
    AttentionOptions without_sinks = options;
    without_sinks.mask.sink_logits = {};
    attention_partial(encoder, {inputs.q, inputs.k_cache, inputs.v_cache, partial}, without_sinks);
    attention_merge(encoder, {partial, inputs.out, inputs.lse, options.mask.sink_logits});
  }

  AttentionAnswer run() const {
    Encoder encoder(device_);
    record(encoder);
    AttentionAnswer answer;
    answer.first = recorded_commands(encoder).at(0);
    encoder.submit().wait();
    answer.out = doubles_of(inputs.out);
    answer.lse = doubles_of(inputs.lse);
    answer.original = reference::attention(shape_, data_);
    reference::AttentionData data = data_;
    data.k = stored(inputs.k_cache);
    data.v = stored(inputs.v_cache);
    answer.decoded = reference::attention(shape_, data);
    return answer;
  }

  std::vector<double> doubles_of(const Tensor& tensor) const {
    Tensor wide = tensor;
    if (tensor.dtype() != DType::f32) {
      wide = device_.tensor(DType::f32, tensor.shape());
      kv_copy(RunNow(device_), {.k = tensor, .k_cache = wide});
    }
    const std::vector<float> values = floats_of(wide);
    return {values.begin(), values.end()};
  }

 private:
  // What a tensor of that dtype holds, so that rounding the input is not counted as an error.
  Tensor typed(const std::vector<float>& values, const Dims& shape, DType dtype) const {
    const Tensor wide = tensor_of(device_, values, shape);
    if (dtype == DType::f32) return wide;
    const Tensor narrow = device_.tensor(dtype, shape);
    kv_copy(RunNow(device_), {.k = wide, .k_cache = narrow});
    return narrow;
  }

  void make_inputs() {
    const Dims q_shape{c_.tokens, c_.heads, c_.k_dim};
    options = {.length = c_.length,
               .ring_start = c_.ring_start,
               .mask = {.causal = c_.causal, .window = c_.window, .soft_cap = c_.soft_cap}};
    const float scale = 1.0f / std::sqrt(static_cast<float>(c_.k_dim));  // as nothing is given
    // With outlier channels in K the query shrinks, so that logits keep their variance.
    const double energy = 1 + static_cast<double>(c_.outliers) * 99 / static_cast<double>(c_.k_dim);
    const float gain = c_.q_gain / static_cast<float>(std::sqrt(energy));
    inputs.q =
        typed(normal_floats(c_.tokens * c_.heads * c_.k_dim, random_, gain), q_shape, c_.q_dtype);
    data_.q = doubles_of(inputs.q);
    inputs.out = device_.tensor(c_.out_dtype, {c_.tokens, c_.heads, c_.v_dim});
    inputs.lse = device_.tensor(DType::f32, {c_.tokens, c_.heads});
    if (c_.sink_logits) options.mask.sink_logits = per_head(data_.sink_logits, 1.0f);
    if (c_.alibi_slopes) options.mask.alibi_slopes = per_head(data_.alibi_slopes, 0.05f);
    if (c_.tree_mask) {
      data_.tree_mask.resize(c_.tokens * c_.tokens);
      for (uint64_t i = 0; i < data_.tree_mask.size(); ++i) {
        const uint64_t row = i / c_.tokens, column = i % c_.tokens;
        data_.tree_mask[i] = row == column || (column < row && random_() % 2 == 0) ? 1 : 0;
      }
      options.mask.tree_mask = tensor_of(device_, data_.tree_mask, {c_.tokens, c_.tokens});
    }
    shape_ = {c_.tokens,   c_.heads,      c_.kv_heads,   c_.k_dim,  c_.v_dim,  c_.length,
              c_.capacity, c_.ring_start, double{scale}, c_.causal, c_.window, double{c_.soft_cap}};
  }

  Tensor per_head(std::vector<double>& values, float gain) {
    const std::vector<float> made = normal_floats(c_.heads, random_, gain);
    values.assign(made.begin(), made.end());
    return tensor_of(device_, made, {c_.heads});
  }

  void fill_caches() {
    inputs.k_cache = KvBuffer::allocate(device_, cache_shape(c_.k, KvRole::k, c_.k_dim));
    inputs.v_cache = KvBuffer::allocate(device_, cache_shape(c_.v, KvRole::v, c_.v_dim));
    data_.k = fill(inputs.k_cache);
    data_.v = fill(inputs.v_cache);
  }

  KvShape cache_shape(KvFormat format, KvRole role, uint64_t head_dim) const {
    KvShape shape{format, role, c_.kv_heads, c_.capacity, head_dim};
    if (class_of(format) == FormatClass::mlx_native) shape.scale_factor = c_.scale_factor;
    return shape;
  }

  std::vector<double> fill(const KvBuffer& cache) {
    const uint64_t n = cache.shape.head_dim, row = c_.kv_heads * n;
    const std::vector<float> nothing(c_.capacity * row, std::numeric_limits<float>::quiet_NaN());
    store(cache, nothing, c_.capacity, 0);
    std::vector<float> rows = normal_floats(c_.length * row, random_);
    for (size_t i = 0; i < rows.size(); ++i) {
      if (c_.outliers != 0 && i % (n / c_.outliers) == 0) rows[i] *= 10;
    }
    store(cache, rows, c_.length, c_.ring_start);
    std::vector<double> by_slot(c_.capacity * row, std::numeric_limits<double>::quiet_NaN());
    for (uint64_t t = 0; t < c_.length; ++t) {
      const uint64_t slot = (c_.ring_start + t) % c_.capacity;
      for (uint64_t i = 0; i < row; ++i) by_slot[slot * row + i] = rows[t * row + i];
    }
    return by_slot;
  }

  void store(const KvBuffer& cache, const std::vector<float>& rows, uint64_t tokens,
             uint64_t position) const {
    if (tokens == 0) return;
    const Tensor source = tensor_of(device_, rows, {tokens, c_.kv_heads, cache.shape.head_dim});
    const KvRange where{.position = position, .cache = CacheKind::ring};
    test::store(device_, source, cache, where);
  }

  // [capacity, kv_heads, head_dim] as the cache holds it.
  std::vector<double> stored(const KvBuffer& cache) const {
    const std::vector<float> values = decoded(device_, cache);
    return {values.begin(), values.end()};
  }

  Device device_;
  AttentionCase c_;
  std::mt19937 random_;
  reference::AttentionShape shape_;
  reference::AttentionData data_;
};

inline AttentionTolerance tolerance_of(const Device& device, const RecordedCommand& command,
                                       const AttentionCase& c) {
  return attention_tolerance(impl_of(device)->describe(*command.kernel, command.spec), c.k, c.v,
                             {.q_gain = c.q_gain, .softened = c.soft_cap != 0 || c.alibi_slopes});
}

// Against double precision over what the cache holds.
inline testing::AssertionResult attention_holds(const Device& device, const AttentionCase& c) {
  const AttentionProblem problem(device, c);
  const AttentionAnswer answer = problem.run();
  const AttentionTolerance tolerance = tolerance_of(device, answer.first, c);
  const double error = nmse(answer.out, answer.decoded.out);
  const double bound = tolerance.nmse + out_rounding(c.out_dtype);
  if (!(error <= bound)) {
    return testing::AssertionFailure() << problem.numbers().text() << ": NMSE of " << tolerance.name
                                       << " " << error << " > " << bound;
  }
  for (size_t i = 0; i < answer.lse.size(); ++i) {
    const double wanted = answer.decoded.lse[i], got = answer.lse[i];
    if (got == wanted) continue;  // -inf
    if (!(std::fabs(got - wanted) <= tolerance.lse)) {
      return testing::AssertionFailure()
             << problem.numbers().text() << ": lse " << i << " is " << got << ", not " << wanted
             << " within " << tolerance.lse;
    }
  }
  return testing::AssertionSuccess();
}

}  // namespace gyre::test
