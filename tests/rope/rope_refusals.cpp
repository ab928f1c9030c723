
#include "gyre_test.h"
#include "rope/rope_refusal.h"

namespace gyre::test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

// Tokens, heads and head_dim of everything.
void resize(RopeCall& c, FilledTensors& t, const Dims& shape) {
  c.in.x = t.make(DType::f32, shape);
  c.in.out = t.make(DType::f32, shape);
  c.in.k = c.in.k_out = {};
  c.in.positions = t.make(DType::i32, {shape[0]});
}

}  // namespace

std::vector<Rule> rope_dim_refusals() {
  return {
      Rule("no tokens", {"at least one token", "got 0"}, CHANGE(resize(c, t, {0, 3, 8}))),
      Rule("no heads", {"at least one head", "got 0"}, CHANGE(resize(c, t, {5, 0, 8}))),
      Rule("no heads of k", {"k must have at least one head", "got 0"},
           CHANGE(c.in.k = c.in.k.slice(1, 0, 0))),
      Rule("no coordinates", {"head_dim", "got 0"}, CHANGE(resize(c, t, {5, 3, 0}))),
      Rule("odd head_dim", {"head_dim must be even", "got 7"}, CHANGE(resize(c, t, {5, 3, 7}))),
      Rule("head_dim 1", {"head_dim must be even", "got 1"}, CHANGE(resize(c, t, {5, 3, 1}))),
      Rule("head_dim above 2048", {"head_dim must be at most 2048", "got 2050"},
           CHANGE(resize(c, t, {1, 1, 2050}))),
      Rule("rotary_dim 0", {"rotary_dim must be even and at least 2", "got 0"},
           CHANGE(c.options.rotary_dim = 0)),
      Rule("odd rotary_dim", {"rotary_dim must be even", "got 5"},
           CHANGE(c.options.rotary_dim = 5)),
      Rule("rotary_dim above head_dim", {"rotary_dim must be at most head_dim 8", "got 10"},
           CHANGE(c.options.rotary_dim = 10)),
      Rule("huge rotary_dim", {"rotary_dim", "got 4294967294"},
           CHANGE(c.options.rotary_dim = 0xFFFFFFFEu)),
      Rule("base 0", {"base must be finite and positive", "got 0"}, CHANGE(c.options.base = 0)),
      Rule("negative base", {"base", "got -10000"}, CHANGE(c.options.base = -10000)),
      Rule("infinite base", {"base", "got inf"}, CHANGE(c.options.base = kInfinity)),
      Rule("base NaN", {"base", "got nan"}, CHANGE(c.options.base = kNaN)),
      Rule("infinite magnitude", {"magnitude must be finite", "got inf"},
           CHANGE(c.options.magnitude = HUGE_VALF)),
      Rule("magnitude NaN", {"magnitude must be finite", "got nan"},
           CHANGE(c.options.magnitude = NAN)),
  };
}

std::vector<Rule> rope_mode_refusals() {
  return {
      Rule("unknown mode", {"7 is not a rope mode"},
           CHANGE(c.options.mode = static_cast<RopeMode>(7))),
      Rule("mode 255", {"255 is not a rope mode"},
           CHANGE(c.options.mode = static_cast<RopeMode>(255))),
      Rule("vision with partial rotary", {"vision", "head_dim 8", "rotary_dim 4"},
           CHANGE(c.options = {.mode = RopeMode::vision, .rotary_dim = 4, .sections = {2, 2, 0, 0}},
                  c.in.positions = t.make(DType::i32, {4, 5}))),
      Rule("vision with too few sections", {"sections[0] + sections[1]", "= 4", "got 2 + 1"},
           CHANGE(c.options = {.mode = RopeMode::vision, .sections = {2, 1, 1, 0}},
                  c.in.positions = t.make(DType::i32, {4, 5}))),
      Rule("vision with too many sections", {"= 4", "got 4 + 1"},
           CHANGE(c.options = {.mode = RopeMode::vision, .sections = {4, 1, 0, 0}},
                  c.in.positions = t.make(DType::i32, {4, 5}))),
      Rule("vision sections whose sum wraps", {"= 4", "got 4294967295 + 5"},
           CHANGE(c.options = {.mode = RopeMode::vision, .sections = {0xFFFFFFFFu, 5, 0, 0}},
                  c.in.positions = t.make(DType::i32, {4, 5}))),
      Rule("huge section", {"section", "1024", "got 1025"},
           CHANGE(c.options = {.mode = RopeMode::sectioned, .sections = {1, 1, 1025, 0}},
                  c.in.positions = t.make(DType::i32, {4, 5}))),
      Rule("vision of adjacent pairs", {"split halves", "adjacent"},
           CHANGE(c.options = {.pairing = RopePairing::adjacent,
                               .mode = RopeMode::vision,
                               .sections = {2, 2, 0, 0}},
                  c.in.positions = t.make(DType::i32, {4, 5}))),
      Rule("vision_2d of adjacent pairs", {"split halves", "adjacent"},
           CHANGE(c.options = {.pairing = RopePairing::adjacent, .mode = RopeMode::vision_2d},
                  c.in.positions = t.make(DType::i32, {2, 5}))),
      Rule("vision_2d with partial rotary", {"vision_2d", "head_dim 8", "rotary_dim 4"},
           CHANGE(c.options = {.mode = RopeMode::vision_2d, .rotary_dim = 4},
                  c.in.positions = t.make(DType::i32, {2, 5}))),
      Rule("vision_2d of head_dim 6", {"vision_2d", "steps of 4", "got 6"},
           CHANGE(resize(c, t, {5, 3, 6}), c.options.mode = RopeMode::vision_2d,
                  c.in.positions = t.make(DType::i32, {2, 5}))),
  };
}

std::vector<Rule> rope_position_refusals() {
  return {
      Rule("no positions", {"positions are undefined"}, CHANGE(c.in.positions = {})),
      Rule("too few positions", {"[tokens] = [5]", "got [4]"},
           CHANGE(c.in.positions = c.in.positions.slice(0, 0, 4))),
      Rule("too many positions", {"[tokens] = [5]", "got [6]"},
           CHANGE(c.in.positions = t.make(DType::i32, {6}))),
      Rule("four axes in mode plain", {"[tokens] = [5]", "got [4, 5]"},
           CHANGE(c.in.positions = t.make(DType::i32, {4, 5}))),
      Rule("flat positions of four axes", {"[axes, tokens] = [4, 5]", "got [20]"},
           CHANGE(c.options.mode = RopeMode::sectioned, c.in.positions = t.make(DType::i32, {20}))),
      Rule("one axis in mode interleaved", {"[4, 5]", "got [5]"},
           CHANGE(c.options.mode = RopeMode::interleaved)),
      Rule("three axes", {"[4, 5]", "got [3, 5]"},
           CHANGE(c.options = {.mode = RopeMode::vision, .sections = {2, 2, 0, 0}},
                  c.in.positions = t.make(DType::i32, {3, 5}))),
      Rule("token-major axes", {"[4, 5]", "got [5, 4]"},
           CHANGE(c.options.mode = RopeMode::sectioned,
                  c.in.positions = t.make(DType::i32, {5, 4}))),
      Rule("four axes in mode vision_2d", {"[2, 5]", "got [4, 5]"},
           CHANGE(c.options.mode = RopeMode::vision_2d,
                  c.in.positions = t.make(DType::i32, {4, 5}))),
      Rule("positions of f32", {"positions must be i32 or u32", "f32"},
           CHANGE(c.in.positions = t.make(DType::f32, {5}))),
      Rule("positions of u8", {"positions must be i32 or u32", "u8"},
           CHANGE(c.in.positions = t.make(DType::u8, {5}))),
  };
}

}  // namespace gyre::test
