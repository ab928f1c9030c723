
#include "gyre_test.h"
#include "kv_codec/kv_codec_case.h"
#include "refused_call.h"

namespace gyre::test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

struct MergeCase {
  uint64_t splits = 3, tokens = 2, heads = 3, head_dim = 16;
  DType out = DType::f32;
  KvLayout layout = KvLayout::token_major;
  bool lse = true, sink_logits = false;
  float spread = 1;  // of the maxima
  // Bit s of row r's number: split s of that row has no keys.
  bool empty_splits = false;

  std::string text() const {
    return str_cat(splits, " splits, ", tokens, "x", heads, "/", head_dim, " to ", out, " ",
                   layout_name(layout), lse ? " lse" : "", sink_logits ? " sink_logits" : "",
                   empty_splits ? " some empty" : "", " spread ", spread);
  }
};

struct MergeRow {
  std::vector<double> sum;  // over splits, relative to `max`
  double max = -kInfinity, weight = 0;
};

class MergeMaker {
 public:
  explicit MergeMaker(const MergeCase& c) : c_(c), random_(static_cast<uint32_t>(c.splits)) {}

  OpRun make() {
    OpRun run;
    fill_partial();
    const reference::KvSide side{c_.out, c_.layout, c_.tokens, c_.heads, c_.head_dim, 0};
    std::vector<float> sink_logits(c_.heads);
    for (float& sink : sink_logits) sink = 2 * normal_(random_);
    run.blocks = {
        plain_block(DType::f32, partial_),
        plain_block(c_.out, pattern_bytes(side.elements() * size_bytes(c_.out), 5)),
        plain_block(DType::f32, pattern_bytes(c_.tokens * c_.heads * sizeof(float), 6)),  // lse
        plain_block(DType::f32, sink_logits)};
    for (uint64_t row = 0; row < c_.tokens * c_.heads; ++row)
      expect_row(run, side, sink_logits, row);
    run.commands = c_.tokens == 0 ? 0 : 1;
    run.record = [c = c_, side](Encoder& encoder, std::span<const Tensor> t) {
      attention_merge(
          encoder,
          {t[0].reshape({c.splits, c.tokens, c.heads, c.head_dim + 2}), kv_view(t[1], side),
           c.lse ? t[2].reshape({c.tokens, c.heads}) : Tensor(), c.sink_logits ? t[3] : Tensor()});
    };
    return run;
  }

 private:
  bool empty(uint64_t split, uint64_t row) const {
    return c_.empty_splits && (row >> split & 1) != 0;
  }

  // An empty split has a sum of 0: what else it holds, in every other one a loud maximum, does not
  // matter.
  void fill_partial() {
    const uint64_t rows = c_.tokens * c_.heads;
    for (uint64_t i = 0; i < c_.splits * rows; ++i) {
      const bool none = empty(i / rows, i % rows);
      for (uint64_t e = 0; e < c_.head_dim; ++e)
        partial_.push_back(none ? 0.0f : 3 * normal_(random_));
      const float none_max = i / rows % 2 == 0 ? -std::numeric_limits<float>::infinity() : 90.0f;
      partial_.push_back(none ? none_max : c_.spread * normal_(random_));
      partial_.push_back(none ? 0.0f : 1 + std::fabs(normal_(random_)));
    }
  }

  MergeRow merged(uint64_t row) const {
    MergeRow result;
    const uint64_t stride = c_.head_dim + 2, rows = c_.tokens * c_.heads;
    for (uint64_t s = 0; s < c_.splits; ++s) {
      if (empty(s, row)) continue;
      result.max = std::max(result.max, double{partial_[(s * rows + row) * stride + c_.head_dim]});
    }
    result.sum.resize(c_.head_dim);
    for (uint64_t s = 0; s < c_.splits; ++s) {
      if (empty(s, row)) continue;
      const float* const part = &partial_[(s * rows + row) * stride];
      const double factor = std::exp(part[c_.head_dim] - result.max);
      result.weight += factor * part[c_.head_dim + 1];
      for (uint64_t e = 0; e < c_.head_dim; ++e) result.sum[e] += factor * part[e];
    }
    return result;
  }

  void expect_row(OpRun& run, const reference::KvSide& side, const std::vector<float>& sink_logits,
                  uint64_t row) const {
    const MergeRow r = merged(row);
    const uint64_t token = row / c_.heads, head = row % c_.heads;
    double lse = r.weight == 0 ? -kInfinity : r.max + std::log(r.weight);
    const double without = lse;
    if (c_.sink_logits)
      lse = std::max(lse, double{sink_logits[head]}) +
            std::log1p(std::exp(-std::fabs(lse - sink_logits[head])));
    // Exponents are rounded to 2^-24 of their size before exp.
    const double relative = 4e-7 * (4 + c_.spread);
    for (uint64_t e = 0; e < c_.head_dim; ++e) {
      const double value = r.weight == 0 ? 0 : r.sum[e] / r.weight * std::exp(without - lse);
      expect_near(run.blocks[1], side.index(token, head, e), value,
                  r.weight == 0 ? 1e-45 : relative * (std::fabs(value) + 1));
    }
    if (!c_.lse) return;
    if (std::isinf(lse)) {
      reference::store_bits(DType::f32, run.blocks[2].after.data(), row, 0xFF800000u);
    } else {
      expect_near(run.blocks[2], row, lse, relative * (std::fabs(lse) + 1));
    }
  }

  MergeCase c_;
  std::mt19937 random_;
  std::normal_distribution<float> normal_;
  std::vector<float> partial_;
};

using Inputs = AttentionMergeInputs;

Inputs good_call(FilledTensors& t) {
  return {t.make(DType::f32, {5, 3, 4, 82}), t.make(DType::f32, {3, 4, 80}),
          t.make(DType::f32, {3, 4}), t.make(DType::f32, {4})};
}

constexpr RefusedCall<Inputs> refusal{"attention_merge: ", good_call,
                                      [](Encoder& e, const Inputs& in) { attention_merge(e, in); }};

std::vector<Refusal> partial_refusals() {
  return {
      refusal("no partial", {"partial is undefined"}, CHANGE(c.partial = {})),
      refusal("partial of rank 3", {"partial must be contiguous f32", "[15, 4, 82]"},
              CHANGE(c.partial = c.partial.reshape({15, 4, 82}))),
      refusal("partial of bf16", {"partial must be contiguous f32", "got bf16"},
              CHANGE(c.partial = t.make(DType::bf16, {5, 3, 4, 82}))),
      refusal("partial with gaps", {"partial must be contiguous f32", "[984, 328, 82, 1]"},
              CHANGE(c.partial = c.partial.slice(1, 0, 2))),
      refusal("no splits", {"partial has no splits"}, CHANGE(c.partial = c.partial.slice(0, 0, 0))),
      refusal("only states", {"v_head_dim + 2 entries", "1024, got 2"},
              CHANGE(c.partial = t.make(DType::f32, {5, 3, 4, 2}))),
      refusal("nothing at all", {"v_head_dim + 2 entries", "1024, got 0"},
              CHANGE(c.partial = t.make(DType::f32, {5, 3, 4, 0}))),
      refusal("partial of another device", {"partial lives on another device"},
              CHANGE(c.partial = on_another_device(DType::f32, {5, 3, 4, 82}))),
  };
}

std::vector<Refusal> output_refusals() {
  return {
      refusal("no out", {"out is undefined"}, CHANGE(c.out = {})),
      refusal("out of i32", {"out must be f32, f16 or bf16", "got i32"},
              CHANGE(c.out = t.make(DType::i32, {3, 4, 80}))),
      refusal("out with the state", {"out must have shape [3, 4, 80]", "got [3, 4, 82]"},
              CHANGE(c.out = t.make(DType::f32, {3, 4, 82}))),
      refusal("out of rank 2", {"out must have shape [3, 4, 80]", "got [12, 80]"},
              CHANGE(c.out = c.out.reshape({12, 80}))),
      refusal("out with gaps", {"head_dim of out must be contiguous", "stride 2"},
              CHANGE(c.out = t.make(DType::f32, {1920}).strided({3, 4, 80}, {640, 160, 2}))),
      refusal("tokens of out in one place", {"[0, 80, 1] make elements of out share memory"},
              CHANGE(c.out = c.out.strided({3, 4, 80}, {0, 80, 1}))),
      refusal("lse of other sizes", {"lse must be f32 [3, 4]", "got f32 [4, 3]"},
              CHANGE(c.lse = t.make(DType::f32, {4, 3}))),
      refusal("lse in one place", {"[4, 0] make elements of lse share memory"},
              CHANGE(c.lse = c.lse.strided({3, 4}, {4, 0}))),
      refusal("sink_logits of other sizes",
              {"sink_logits must be contiguous f32 [4]", "got f32 [3]"},
              CHANGE(c.sink_logits = c.sink_logits.slice(0, 0, 3))),
      refusal("lse in out", {"lse and out share memory"},
              CHANGE(c.lse = c.out.strided({3, 4}, {4, 1}, 100))),
      refusal("out in partial", {"out shares memory with an input"},
              CHANGE(c.out = c.partial.strided({3, 4, 80}, {328, 82, 1}))),
      refusal("out is sink_logits", {"out shares memory with an input"},
              CHANGE(c.sink_logits = c.out.strided({4}, {1}, 956))),
      refusal("lse in partial", {"lse shares memory with an input"},
              CHANGE(c.lse = c.partial.strided({3, 4}, {4, 1}, 4900))),
      refusal("lse is sink_logits", {"lse shares memory with an input"},
              CHANGE(c.sink_logits = c.lse.strided({4}, {1}, 8))),
      refusal("read-only out", {"out is written", "read-only"},
              CHANGE(c.out = read_only(t.device(), c.out))),
      refusal("read-only lse", {"lse is written", "read-only"},
              CHANGE(c.lse = read_only(t.device(), c.lse))),
  };
}

Refusal shape_refusal(std::string name, std::vector<std::string> message, uint64_t splits,
                      const Dims& q_shape, uint64_t head_dim) {
  message.emplace_back("attention_partial_shape: ");
  return {std::move(name), std::move(message),
          [=](Encoder&, FilledTensors&) { attention_partial_shape(splits, q_shape, head_dim); }};
}

}  // namespace

std::vector<OpCase> attention_merge_cases() {
  std::vector<MergeCase> list;
  for (const uint64_t splits : {1u, 2u, 5u, 64u}) {
    for (const uint64_t head_dim : {1u, 7u, 16u, 80u, 1024u})
      list.push_back({.splits = splits, .head_dim = head_dim});
  }
  for (const DType out : kFloats) {
    for (const KvLayout layout : {KvLayout::head_major, KvLayout::padded, KvLayout::interleaved})
      list.push_back({.out = out, .layout = layout, .lse = out != DType::f32, .sink_logits = true});
  }
  for (const float spread : {0.0f, 20.0f, 200.0f}) {
    list.push_back({.splits = 4, .tokens = 4, .heads = 4, .spread = spread, .empty_splits = true});
    list.push_back({.splits = 4,
                    .tokens = 4,
                    .heads = 4,
                    .sink_logits = true,
                    .spread = spread,
                    .empty_splits = true});
  }
  list.push_back({.tokens = 0});
  list.push_back({.splits = 9, .tokens = 40, .heads = 16, .head_dim = 64});  // several tasks
  std::vector<OpCase> cases;
  for (const MergeCase& c : list)
    cases.push_back(kernel_case("attention_merge", c.text(), [c] { return MergeMaker(c).make(); }));
  return cases;
}

std::vector<Refusal> attention_merge_refusals() {
  return concat(
      {partial_refusals(),
       output_refusals(),
       {shape_refusal("no splits", {"at least one split"}, 0, {3, 4, 64}, 64),
        shape_refusal("q of rank 2", {"q must be", "[3, 4]"}, 1, {3, 4}, 64),
        shape_refusal("large head_dim", {"at most 1024", "got 1025"}, 1, {3, 4, 64}, 1025),
        shape_refusal("huge head_dim", {"at most 1024", std::to_string(~uint64_t{0})}, 1,
                      {3, 4, 64}, ~uint64_t{0})}});
}

}  // namespace gyre::test
