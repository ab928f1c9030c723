#include "stress/fuzz_world.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>

namespace gyre::test {
namespace {

constexpr uint8_t kBorder = 0xA5;
// Under a sanitizer memory ends where the tensor does, and reads are found, too.
constexpr size_t kBorderBytes = kSanitized ? 0 : 64;
constexpr uint64_t kHeavyElements = 1 << 16;

// Opened once: threads are slow to start.
const Device& shared_device(bool other) {
  static const Device kDevice = Device::open("cpu", {.threads = 2, .spin_us = 20});
  static const Device kOther = Device::open("cpu", {.threads = 1});
  return other ? kOther : kDevice;
}

const std::string& folder() {
  struct Folder {
    std::string name = (std::filesystem::exists("/dev/shm") ? "/dev/shm" : "/tmp") +
                       std::string("/gyre_api_fuzz_") + std::to_string(getpid());
    Folder() { std::filesystem::create_directories(name); }
    ~Folder() {
      std::error_code ignored;
      std::filesystem::remove_all(name, ignored);
    }
  };
  static const Folder kFolder;
  return kFolder.name;
}

Dims contiguous(const Dims& shape) {
  Dims strides = shape;
  uint64_t stride = 1;
  for (uint32_t d = shape.size(); d-- > 0;) {
    strides[d] = stride;
    stride *= std::max<uint64_t>(shape[d], 1);
  }
  return strides;
}

// Elements from the first to the last.
uint64_t extent(const Dims& shape, const Dims& strides) {
  uint64_t last = 0;
  for (uint32_t d = 0; d < shape.size(); ++d) {
    if (shape[d] == 0) return 0;
    last += (shape[d] - 1) * strides[d];
  }
  return last + 1;
}

void mark(std::vector<uint8_t>& outside, size_t at, const Tensor& view, uint32_t dim) {
  const uint64_t unit = size_bytes(view.dtype());
  if (dim == view.rank()) {
    std::memset(outside.data() + at, 0, unit);
  } else if (dim + 1 == view.rank() && view.stride(dim) == 1) {
    std::memset(outside.data() + at, 0, unit * view.shape(dim));
  } else {
    for (uint64_t i = 0; i < view.shape(dim); ++i)
      mark(outside, at + i * view.stride(dim) * unit, view, dim + 1);
  }
}

}  // namespace

FuzzStats& fuzz_stats() {
  static FuzzStats stats;
  return stats;
}

void trim_fuzz_devices() {
  for (const bool other : {false, true}) shared_device(other).trim();
}

void expect(bool holds, const std::string& rule) {
  if (!holds) throw FuzzFailure(std::string(fuzz_stats().current) + ": " + rule);
}

FuzzWorld::FuzzWorld(std::span<const uint8_t> bytes)
    : in(bytes),
      device(shared_device(false)),
      other(shared_device(true)),
      encoder(device),
      stranger(other),
      moved(device) {
  const Encoder taken = std::move(moved);
  wild_ = in.chance(4);
}

FuzzWorld::~FuzzWorld() {
  for (const std::string& path : paths_) unlink(path.c_str());
  try {
    device.stop_trace();
  } catch (const Error&) {
  }
}

FuzzCount& FuzzWorld::begin(const char* name) {
  fuzz_stats().current = name;
  commands_ = encoder.size();
  barriers_ = encoder.barriers();
  return fuzz_stats().calls[name];
}

void FuzzWorld::check_refused(const char* name, const Error& error) {
  expect(error.what()[0] != '\0', std::string(name) + " was refused without a message");
  expect(encoder.size() == commands_ && encoder.barriers() == barriers_,
         std::string(name) + " was refused and left commands: " + error.what());
}

DType FuzzWorld::float_type() { return in.one_of(std::array{DType::f32, DType::f16, DType::bf16}); }

DType FuzzWorld::any_type() { return static_cast<DType>(in.below(kDTypeCount + 1)); }

KvFormat FuzzWorld::format() {
  if (in.spoil()) return static_cast<KvFormat>(in.byte());
  // The mlx-native formats, the last four, take few head dims.
  const std::span<const KvFormat> all = kv_formats();
  return all[in.below(in.chance(8) ? all.size() : all.size() - 4)];
}

uint64_t FuzzWorld::head_dim() {
  if (in.chance(16)) return in.one_of(std::array<uint64_t, 4>{4, 8, 512, 1024});
  return in.number(in.one_of(std::array<uint64_t, 8>{16, 32, 64, 128, 24, 48, 80, 256}));
}

Encoder& FuzzWorld::some_encoder() {
  if (!in.spoil()) return encoder;
  return in.chance(2) ? moved : stranger;
}

const Device& FuzzWorld::some_device() { return in.spoil() ? other : device; }

std::string FuzzWorld::path() {
  std::string made = folder();
  made += '/';
  if (!in.spoil()) {
    made += static_cast<char>('a' + in.below(4));
  } else {
    switch (in.below(6)) {
      case 0:
        return "";
      case 1:
        return folder();
      case 2:
        return "/dev/null";
      case 3:
        made.append(1 + in.below(5000), 'n');
        break;
      case 4:
        made.append("a\0b", 3);
        break;
      default:
        made += "none/file";
    }
  }
  paths_.push_back(made);
  return made;
}

void FuzzWorld::fill(const Tensor& tensor) {
  const uint64_t count = tensor.elements();
  if (count == 0 || count > kHeavyElements) return;
  uint32_t state = static_cast<uint32_t>(in.byte()) * 2654435761u + 1;
  const auto next = [&state] { return state = state * 1664525u + 1013904223u; };
  const auto real = [&] {
    const uint32_t bits = next();
    if (wild_ && bits % 64 == 0) {
      constexpr float kWild[] = {__builtin_inff(), __builtin_nanf(""), 1e38f, 1e-42f};
      return kWild[(bits >> 8) % 4];
    }
    return static_cast<float>(static_cast<int32_t>(bits)) * 0x1p-31f;
  };
  with_type(tensor.dtype(), [&](auto type) {
    using Type = decltype(type);
    std::vector<Type> filled(count);
    for (Type& value : filled) {
      if constexpr (std::is_same_v<Type, int32_t>) {
        value = static_cast<int32_t>(next()) >> 20;
      } else if constexpr (std::is_integral_v<Type>) {
        value = static_cast<Type>(next() >> (sizeof(Type) == 1 ? 24 : 20));
      } else {
        value = Type(real());
      }
    }
    tensor.write_from(std::span<const Type>(filled));
  });
}

Tensor FuzzWorld::guarded(const Device& on, DType dtype, const Dims& shape, const Dims& strides) {
  const uint64_t unit = size_bytes(dtype), offset = kBorderBytes + in.below(16) * unit;
  auto memory = std::make_shared<std::vector<uint8_t>>(
      offset + extent(shape, strides) * unit + kBorderBytes, kBorder);
  Tensor view = on.wrap(memory->data() + offset, dtype, shape, strides, memory);
  fill(view);
  Block block{
      memory, std::vector<uint8_t>(memory->size(), 1), dtype, shape, strides, fuzz_stats().current};
  if (view.elements() != 0) mark(block.outside, offset, view, 0);
  blocks_.push_back(std::move(block));
  return view;
}

Tensor FuzzWorld::good(const Device& on, DType dtype, const Dims& shape, bool gaps) {
  uint64_t elements = 1;  // as far as they are counted
  bool is_heavy = false;
  for (const uint64_t n : shape) {
    is_heavy = is_heavy || n > kHeavyElements || elements * n > kHeavyElements;
    elements = is_heavy ? 0 : elements * n;
  }
  if (is_heavy) {  // of odd numbers: refused, or not run
    heavy_ = true;
    return on.tensor(dtype, shape);
  }
  const uint64_t kind = in.below(4);
  if (kind == 0) {
    Tensor made = on.tensor(dtype, shape);
    fill(made);
    return made;
  }
  Dims strides = contiguous(shape);
  if (gaps && kind == 1) {
    for (uint32_t d = shape.size(); d-- > 1;)
      strides[d - 1] = strides[d] * std::max<uint64_t>(shape[d], 1) + 8 * in.below(3);
  } else if (gaps && kind == 2 && shape.size() == 3) {  // heads outside
    strides[0] = shape[2];
    strides[1] = shape[2] * shape[0];
  }
  for (uint32_t d = 0; d < shape.size(); ++d) {
    // A stride over one entry, or none, means nothing.
    if (shape[d] <= 1 && in.chance(4)) strides[d] = in.chance(2) ? in.below(500) : in.extreme();
  }
  return guarded(on, dtype, shape, strides);
}

void FuzzWorld::keep(const Tensor& tensor) {
  if (kept.size() < 8) {
    kept.push_back(tensor);
  } else {
    kept[in.below(8)] = tensor;
  }
}

Tensor FuzzWorld::tensor(DType dtype, const Dims& shape) {
  Tensor made = in.spoil() ? odd(dtype, shape) : good(device, dtype, shape, true);
  if (in.chance(32)) keep(made);
  return made;
}

Tensor FuzzWorld::packed(DType dtype, const Dims& shape) {
  return in.spoil() ? odd(dtype, shape) : good(device, dtype, shape, false);
}

Tensor FuzzWorld::odd_shape(DType dtype, Dims shape) {
  if (shape.size() != 0) {
    const auto dim = static_cast<uint32_t>(in.below(shape.size()));
    constexpr std::array<uint64_t, 4> kDims = {0, 1, 3, 40};
    shape[dim] = in.chance(2) ? in.one_of(kDims) : shape[dim] + 1;
  }
  if (in.chance(4)) shape = shape.size() == 3 ? Dims{shape[0], shape[1]} : Dims{1, 2, 3, 4};
  return good(device, dtype, shape, true);
}

// Strides that overlap, repeat or reach far.
Tensor FuzzWorld::odd_view(DType dtype, const Dims& shape) {
  Dims strides = contiguous(shape), odd_shape = shape;
  if (shape.size() != 0) {
    const auto dim = static_cast<uint32_t>(in.below(shape.size()));
    strides[dim] = in.below(4);
    if (in.chance(4)) {  // any number of the same element
      strides[dim] = 0;
      odd_shape[dim] = in.extreme();
      heavy_ = true;
    }
  }
  const Tensor base = good(device, dtype, {4096}, false);
  return base.strided(odd_shape, strides, in.below(16));
}

Tensor FuzzWorld::odd(DType dtype, const Dims& shape) {
  switch (in.below(8)) {
    case 0:
      return {};
    case 1:
      return good(other, dtype, shape, true);
    case 2:
      return kept.empty() ? Tensor() : kept[in.below(kept.size())];
    case 3:
      return good(device, static_cast<DType>(in.below(kDTypeCount)), shape, true);
    case 4:
      return odd_shape(dtype, shape);
    case 5: {  // read-only
      const Tensor made = good(device, dtype, shape, false);
      return device.wrap(reinterpret_cast<const void*>(made.address()), dtype, shape, {},
                         std::make_shared<Tensor>(made));
    }
    case 6: {
      Tensor made = good(device, dtype, shape, true);
      const Tensor taken = std::move(made);
      return made;  // NOLINT(bugprone-use-after-move): what a moved-from tensor is
    }
    default:
      return odd_view(dtype, shape);
  }
}

bool FuzzWorld::submit() {
  const bool ran = !heavy_ && call("Encoder::submit", [&] {
    encoder.submit().wait();
  }) && (stranger.size() == 0 || call("Encoder::submit", [&] { stranger.submit().wait(); }));
  if (!ran) {
    call("Encoder::clear", [&] { encoder.clear(); });
    stranger.clear();
    heavy_ = false;
  }
  for (const Block& block : blocks_) {
    for (size_t i = 0; i < block.outside.size(); ++i) {
      if (block.outside[i] != 0 && (*block.memory)[i] != kBorder)
        expect(false, "byte " + std::to_string(i) + " of " + std::to_string(block.outside.size()) +
                          " was written, outside a tensor " + std::string(name(block.dtype)) +
                          block.shape.text() + " with strides " + block.strides.text() +
                          ", made after " + block.before);
    }
  }
  blocks_.clear();
  return ran;
}

std::vector<float> values(const Tensor& tensor) {
  return with_type(tensor.dtype(), [&](auto type) {
    std::vector<decltype(type)> read(tensor.elements());
    tensor.read_to(std::span(read));
    std::vector<float> all;
    for (const auto value : read) all.push_back(static_cast<float>(value));
    return all;
  });
}

void expect_bounded(const Tensor& tensor, float bound, const char* what) {
  ++fuzz_stats().compared;
  for (const float value : values(tensor))
    expect(std::abs(value) <= bound, std::string(what) + " is " + std::to_string(value));
}

}  // namespace gyre::test
