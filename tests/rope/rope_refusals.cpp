#include <cmath>
#include <limits>

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

std::vector<RopeRefusal> rope_dim_refusals() {
  return {
      {"no tokens",
       {"at least one token", "got 0"},
       [](RopeCall& c, FilledTensors& t) {
         resize(c, t, {0, 3, 8});
       }},
      {"no heads",
       {"at least one head", "got 0"},
       [](RopeCall& c, FilledTensors& t) {
         resize(c, t, {5, 0, 8});
       }},
      {"no heads of k",
       {"k must have at least one head", "got 0"},
       [](RopeCall& c, FilledTensors&) { c.in.k = c.in.k.slice(1, 0, 0); }},
      {"no coordinates",
       {"head_dim", "got 0"},
       [](RopeCall& c, FilledTensors& t) {
         resize(c, t, {5, 3, 0});
       }},
      {"odd head_dim",
       {"head_dim must be even", "got 7"},
       [](RopeCall& c, FilledTensors& t) {
         resize(c, t, {5, 3, 7});
       }},
      {"head_dim 1",
       {"head_dim must be even", "got 1"},
       [](RopeCall& c, FilledTensors& t) {
         resize(c, t, {5, 3, 1});
       }},
      {"head_dim above 2048",
       {"head_dim must be at most 2048", "got 2050"},
       [](RopeCall& c, FilledTensors& t) {
         resize(c, t, {1, 1, 2050});
       }},
      {"rotary_dim 0",
       {"rotary_dim must be even and at least 2", "got 0"},
       [](RopeCall& c, FilledTensors&) { c.options.rotary_dim = 0; }},
      {"odd rotary_dim",
       {"rotary_dim must be even", "got 5"},
       [](RopeCall& c, FilledTensors&) { c.options.rotary_dim = 5; }},
      {"rotary_dim above head_dim",
       {"rotary_dim must be at most head_dim 8", "got 10"},
       [](RopeCall& c, FilledTensors&) { c.options.rotary_dim = 10; }},
      {"huge rotary_dim",
       {"rotary_dim", "got 4294967294"},
       [](RopeCall& c, FilledTensors&) { c.options.rotary_dim = 0xFFFFFFFEu; }},
      {"base 0",
       {"base must be finite and positive", "got 0"},
       [](RopeCall& c, FilledTensors&) { c.options.base = 0; }},
      {"negative base",
       {"base", "got -10000"},
       [](RopeCall& c, FilledTensors&) { c.options.base = -10000; }},
      {"infinite base",
       {"base", "got inf"},
       [](RopeCall& c, FilledTensors&) { c.options.base = kInfinity; }},
      {"base NaN", {"base", "got nan"}, [](RopeCall& c, FilledTensors&) { c.options.base = kNaN; }},
      {"infinite magnitude",
       {"magnitude must be finite", "got inf"},
       [](RopeCall& c, FilledTensors&) { c.options.magnitude = HUGE_VALF; }},
      {"magnitude NaN",
       {"magnitude must be finite", "got nan"},
       [](RopeCall& c, FilledTensors&) { c.options.magnitude = NAN; }},
  };
}

std::vector<RopeRefusal> rope_mode_refusals() {
  return {
      {"unknown mode",
       {"7 is not a rope mode"},
       [](RopeCall& c, FilledTensors&) { c.options.mode = static_cast<RopeMode>(7); }},
      {"mode 255",
       {"255 is not a rope mode"},
       [](RopeCall& c, FilledTensors&) { c.options.mode = static_cast<RopeMode>(255); }},
      {"vision with partial rotary",
       {"vision", "head_dim 8", "rotary_dim 4"},
       [](RopeCall& c, FilledTensors& t) {
         c.options = {.mode = RopeMode::vision, .rotary_dim = 4, .sections = {2, 2, 0, 0}};
         c.in.positions = t.make(DType::i32, {4, 5});
       }},
      {"vision with too few sections",
       {"sections[0] + sections[1]", "= 4", "got 2 + 1"},
       [](RopeCall& c, FilledTensors& t) {
         c.options = {.mode = RopeMode::vision, .sections = {2, 1, 1, 0}};
         c.in.positions = t.make(DType::i32, {4, 5});
       }},
      {"vision with too many sections",
       {"= 4", "got 4 + 1"},
       [](RopeCall& c, FilledTensors& t) {
         c.options = {.mode = RopeMode::vision, .sections = {4, 1, 0, 0}};
         c.in.positions = t.make(DType::i32, {4, 5});
       }},
      {"vision sections whose sum wraps",
       {"= 4", "got 4294967295 + 5"},
       [](RopeCall& c, FilledTensors& t) {
         c.options = {.mode = RopeMode::vision, .sections = {0xFFFFFFFFu, 5, 0, 0}};
         c.in.positions = t.make(DType::i32, {4, 5});
       }},
      {"huge section",
       {"section", "1024", "got 1025"},
       [](RopeCall& c, FilledTensors& t) {
         c.options = {.mode = RopeMode::sectioned, .sections = {1, 1, 1025, 0}};
         c.in.positions = t.make(DType::i32, {4, 5});
       }},
      {"vision of adjacent pairs",
       {"split halves", "adjacent"},
       [](RopeCall& c, FilledTensors& t) {
         c.options = {
             .pairing = RopePairing::adjacent, .mode = RopeMode::vision, .sections = {2, 2, 0, 0}};
         c.in.positions = t.make(DType::i32, {4, 5});
       }},
      {"vision_2d of adjacent pairs",
       {"split halves", "adjacent"},
       [](RopeCall& c, FilledTensors& t) {
         c.options = {.pairing = RopePairing::adjacent, .mode = RopeMode::vision_2d};
         c.in.positions = t.make(DType::i32, {2, 5});
       }},
      {"vision_2d with partial rotary",
       {"vision_2d", "head_dim 8", "rotary_dim 4"},
       [](RopeCall& c, FilledTensors& t) {
         c.options = {.mode = RopeMode::vision_2d, .rotary_dim = 4};
         c.in.positions = t.make(DType::i32, {2, 5});
       }},
      {"vision_2d of head_dim 6",
       {"vision_2d", "steps of 4", "got 6"},
       [](RopeCall& c, FilledTensors& t) {
         resize(c, t, {5, 3, 6});
         c.options.mode = RopeMode::vision_2d;
         c.in.positions = t.make(DType::i32, {2, 5});
       }},
  };
}

std::vector<RopeRefusal> rope_position_refusals() {
  return {
      {"no positions",
       {"positions are undefined"},
       [](RopeCall& c, FilledTensors&) { c.in.positions = {}; }},
      {"too few positions",
       {"[tokens] = [5]", "got [4]"},
       [](RopeCall& c, FilledTensors&) { c.in.positions = c.in.positions.slice(0, 0, 4); }},
      {"too many positions",
       {"[tokens] = [5]", "got [6]"},
       [](RopeCall& c, FilledTensors& t) { c.in.positions = t.make(DType::i32, {6}); }},
      {"four axes in mode plain",
       {"[tokens] = [5]", "got [4, 5]"},
       [](RopeCall& c, FilledTensors& t) {
         c.in.positions = t.make(DType::i32, {4, 5});
       }},
      {"flat positions of four axes",
       {"[axes, tokens] = [4, 5]", "got [20]"},
       [](RopeCall& c, FilledTensors& t) {
         c.options.mode = RopeMode::sectioned;
         c.in.positions = t.make(DType::i32, {20});
       }},
      {"one axis in mode interleaved",
       {"[4, 5]", "got [5]"},
       [](RopeCall& c, FilledTensors&) { c.options.mode = RopeMode::interleaved; }},
      {"three axes",
       {"[4, 5]", "got [3, 5]"},
       [](RopeCall& c, FilledTensors& t) {
         c.options = {.mode = RopeMode::vision, .sections = {2, 2, 0, 0}};
         c.in.positions = t.make(DType::i32, {3, 5});
       }},
      {"token-major axes",
       {"[4, 5]", "got [5, 4]"},
       [](RopeCall& c, FilledTensors& t) {
         c.options.mode = RopeMode::sectioned;
         c.in.positions = t.make(DType::i32, {5, 4});
       }},
      {"four axes in mode vision_2d",
       {"[2, 5]", "got [4, 5]"},
       [](RopeCall& c, FilledTensors& t) {
         c.options.mode = RopeMode::vision_2d;
         c.in.positions = t.make(DType::i32, {4, 5});
       }},
      {"positions of f32",
       {"positions must be i32 or u32", "f32"},
       [](RopeCall& c, FilledTensors& t) { c.in.positions = t.make(DType::f32, {5}); }},
      {"positions of u8",
       {"positions must be i32 or u32", "u8"},
       [](RopeCall& c, FilledTensors& t) { c.in.positions = t.make(DType::u8, {5}); }},
  };
}

}  // namespace gyre::test
