#include "files/container.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <cstring>
#include <new>

namespace gyre {

Checksum::Checksum() : state_(XXH3_createState()) {
  if (state_ == nullptr) throw std::bad_alloc();
  XXH3_64bits_reset(static_cast<XXH3_state_t*>(state_));
}

Checksum::~Checksum() { XXH3_freeState(static_cast<XXH3_state_t*>(state_)); }

void Checksum::add(std::span<const std::byte> bytes) {
  XXH3_64bits_update(static_cast<XXH3_state_t*>(state_), bytes.data(), bytes.size());
}

uint64_t Checksum::value() const {
  return XXH3_64bits_digest(static_cast<const XXH3_state_t*>(state_));
}

uint64_t checksum_of(std::span<const std::byte> bytes) {
  return XXH3_64bits(bytes.data(), bytes.size());
}

void FieldWriter::number(uint64_t value, size_t bytes) {
  for (size_t i = 0; i < bytes; ++i) bytes_.push_back(static_cast<std::byte>(value >> (8 * i)));
}

void FieldWriter::text(std::string_view value, size_t width) {
  for (size_t i = 0; i < width; ++i) put(i < value.size() ? value[i] : '\0');
}

std::vector<std::byte> FieldWriter::seal() {
  put(checksum_of(bytes_));
  return std::move(bytes_);
}

std::span<const std::byte> FieldReader::take(size_t count) {
  check_file(count <= bytes_.size(), where_, "the header ends in the middle of a field");
  const std::span<const std::byte> taken = bytes_.first(count);
  bytes_ = bytes_.subspan(count);
  return taken;
}

uint64_t FieldReader::number(size_t bytes) {
  uint64_t value = 0;
  const std::span<const std::byte> raw = take(bytes);
  for (size_t i = 0; i < bytes; ++i) value |= static_cast<uint64_t>(raw[i]) << (8 * i);
  return value;
}

std::string FieldReader::text(size_t width) {
  const std::span<const std::byte> raw = take(width);
  const std::string text(reinterpret_cast<const char*>(raw.data()), raw.size());
  return text.substr(0, text.find_last_not_of('\0') + 1);
}

uint32_t FieldReader::check_kind(const FileKind& kind) {
  check_file(text(FileKind::kMagicBytes) == kind.magic, where_, "does not begin with ", kind.magic,
             ", it is not ", kind.what);
  uint32_t version = 0;
  get(version);
  const uint32_t oldest = kind.oldest != 0 ? kind.oldest : kind.version;
  const std::string known =
      oldest != kind.version ? join(oldest, " to ", kind.version) : std::to_string(kind.version);
  check_file(version >= oldest && version <= kind.version, where_, "is ", kind.what, " of version ",
             version, ", this library reads version ", known);
  return version;
}

void check_seal(const std::string& where, const std::string& what,
                std::span<const std::byte> sealed) {
  uint64_t expected = 0;
  const size_t covered = sealed.size() - kSealBytes;
  FieldReader(where, sealed.subspan(covered)).get(expected);
  check_checksum(where, what, checksum_of(sealed.first(covered)), expected);
}

std::vector<std::byte> Source::read(uint64_t offset, uint64_t bytes) const {
  std::vector<std::byte> made(bytes);
  read(offset, made);
  return made;
}

uint64_t Source::checksum(uint64_t begin, uint64_t end) const {
  Checksum sum;
  for (uint64_t at = begin; at < end; at += kFileChunkBytes)
    sum.add(read(at, std::min(kFileChunkBytes, end - at)));
  return sum.value();
}

void BytesSource::read(uint64_t offset, std::span<std::byte> to) const {
  check_file(offset <= bytes_.size() && to.size() <= bytes_.size() - offset, where(), "has ",
             bytes_.size(), " bytes, asked for ", to.size(), " from ", offset);
  if (!to.empty()) std::memcpy(to.data(), bytes_.data() + offset, to.size());
}

}  // namespace gyre
