#include "safetensors.h"

#include <gyre/dtype.h>
#include <gyre/error.h>

#include <bit>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>

namespace tiny_model {
namespace {

static_assert(std::endian::native == std::endian::little, "the format is little-endian");

constexpr uint64_t kMaxHeaderBytes = 100'000'000;  // what the format's own library accepts

[[noreturn]] void refuse(const std::filesystem::path& path, const std::string& why) {
  throw gyre::Error(gyre::ErrorCode::io, "safetensors: " + path.string() + ": " + why);
}

// 0: a dtype that no tensor here has.
uint64_t element_bytes(const std::string& dtype) {
  if (dtype == "F32" || dtype == "I32") return 4;
  return dtype == "F16" || dtype == "BF16" ? 2 : 0;
}

// None: it is not a list of sizes.
std::optional<std::vector<uint64_t>> sizes(const nlohmann::json& entry, const char* key) {
  const auto list = entry.find(key);
  if (list == entry.end() || !list->is_array()) return std::nullopt;
  std::vector<uint64_t> values;
  for (const nlohmann::json& value : *list) {
    if (!value.is_number_unsigned()) return std::nullopt;
    values.push_back(value.get<uint64_t>());
  }
  return values;
}

// None: the product does not fit in 64 bits.
std::optional<uint64_t> product(uint64_t first, const std::vector<uint64_t>& factors) {
  uint64_t result = first;
  for (const uint64_t factor : factors) {
    if (factor != 0 && result > std::numeric_limits<uint64_t>::max() / factor) return std::nullopt;
    result *= factor;
  }
  return result;
}

template <class Stored>
std::vector<float> widen(const std::vector<Stored>& stored) {
  std::vector<float> values;
  values.reserve(stored.size());
  for (const Stored value : stored) values.push_back(static_cast<float>(value));
  return values;
}

std::string text(const std::vector<uint64_t>& shape) { return nlohmann::json(shape).dump(); }

}  // namespace

SafeTensors::SafeTensors(const std::filesystem::path& path)
    : path_(path), file_(path, std::ios::binary) {
  std::error_code failed;
  const uint64_t file_bytes = std::filesystem::file_size(path, failed);
  if (failed || !file_) refuse(path, "cannot be opened");
  uint64_t header_bytes = 0;
  if (!file_.read(reinterpret_cast<char*>(&header_bytes), sizeof header_bytes)) {
    refuse(path, "has no header");
  }
  if (header_bytes > kMaxHeaderBytes || header_bytes > file_bytes - sizeof header_bytes) {
    refuse(path, "the header has " + std::to_string(header_bytes) + " bytes, the file " +
                     std::to_string(file_bytes));
  }
  std::string header(header_bytes, '\0');
  if (!file_.read(header.data(), static_cast<std::streamsize>(header_bytes))) {
    refuse(path, "the header cannot be read");
  }
  const auto entries = nlohmann::json::parse(header, nullptr, /*allow_exceptions=*/false);
  if (!entries.is_object()) refuse(path, "the header is not a JSON object");

  const uint64_t data_begin = sizeof header_bytes + header_bytes;
  const uint64_t data_bytes = file_bytes - data_begin;
  for (const auto& [name, entry] : entries.items()) {
    if (name == "__metadata__") continue;
    const bool typed = entry.is_object() && entry.contains("dtype") && entry["dtype"].is_string();
    const auto shape = sizes(entry, "shape"), offsets = sizes(entry, "data_offsets");
    if (!typed || !shape || !offsets || offsets->size() != 2) {
      refuse(path, name + " must have a dtype, a shape and two data_offsets, got " + entry.dump());
    }
    const uint64_t begin = (*offsets)[0], end = (*offsets)[1];
    if (begin > end || end > data_bytes) {
      refuse(path, name + " must lie within " + std::to_string(data_bytes) + " bytes, got " +
                       text(*offsets));
    }
    const auto dtype = entry["dtype"].get<std::string>();
    const uint64_t unit = element_bytes(dtype);
    if (unit != 0 && product(unit, *shape) != end - begin) {
      refuse(path, name + " does not have " + std::to_string(end - begin) +
                       " bytes: its shape is " + text(*shape));
    }
    entries_[name] = {dtype, *shape, data_begin + begin, end - begin};
  }
}

const SafeTensors::Entry& SafeTensors::find(const std::string& name) const {
  const auto found = entries_.find(name);
  if (found == entries_.end()) refuse(path_, "there is no tensor " + name);
  return found->second;
}

template <class T>
std::vector<T> SafeTensors::read(const Entry& entry) const {
  std::vector<T> values(entry.bytes / sizeof(T));
  file_.seekg(static_cast<std::streamoff>(entry.begin));
  if (!file_.read(reinterpret_cast<char*>(values.data()),
                  static_cast<std::streamsize>(entry.bytes))) {
    refuse(path_, "the tensors cannot be read");
  }
  return values;
}

std::vector<float> SafeTensors::floats(const std::string& name,
                                       const std::vector<uint64_t>& shape) const {
  const Entry& entry = find(name);
  if (entry.shape != shape) {
    refuse(path_, name + " must have the shape " + text(shape) + ", got " + text(entry.shape));
  }
  if (entry.dtype == "F32") return read<float>(entry);
  if (entry.dtype == "F16") return widen(read<gyre::Half>(entry));
  if (entry.dtype == "BF16") return widen(read<gyre::BFloat16>(entry));
  refuse(path_, name + " must be F32, F16 or BF16, got " + entry.dtype);
}

std::vector<int32_t> SafeTensors::integers(const std::string& name) const {
  const Entry& entry = find(name);
  if (entry.dtype != "I32") refuse(path_, name + " must be I32, got " + entry.dtype);
  return read<int32_t>(entry);
}

}  // namespace tiny_model
