#pragma once
// The container of snapshots, sequences, prefixes and exported pages: magic, version and fields in
// little endian, sealed by a checksum, and sections behind them. A file replaces the one before it
// as a whole. What is read may be anything: each number is checked before it is used.

#include <cstddef>
#include <cstdint>
#include <iomanip>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/require.h"

namespace gyre {

constexpr uint64_t kSealBytes = sizeof(uint64_t);        // the checksum behind the fields
constexpr uint64_t kFileChunkBytes = uint64_t{1} << 20;  // staged at a time

// XXH3, 64 bits.
class Checksum {
 public:
  Checksum();
  Checksum(const Checksum&) = delete;
  Checksum& operator=(const Checksum&) = delete;
  ~Checksum();
  void add(std::span<const std::byte> bytes);
  uint64_t value() const;

 private:
  void* state_;
};

uint64_t checksum_of(std::span<const std::byte> bytes);

// `where` opens the message: the call and the file.
template <class... Parts>
void check_file(bool holds, const std::string& where, const Parts&... parts) {
  if (!holds) [[unlikely]] {
    fail(ErrorCode::io, where, ": ", parts...);
  }
}

// `what` names the checksummed part: "the header".
inline void check_checksum(const std::string& where, const std::string& what, uint64_t checksum,
                           uint64_t expected) {
  const auto digits = std::setw(16);
  check_file(checksum == expected, where, what, "'s checksum is ", std::hex, std::setfill('0'),
             digits, checksum, ", expected ", digits, expected, ": it is damaged");
}

// Magic and version have the same place in every version of a kind of file.
struct FileKind {
  std::string_view magic;  // up to kMagicBytes, the rest is zero
  uint32_t version;
  const char* what;     // "a snapshot"
  uint32_t oldest = 0;  // that is read; 0: `version` alone
  static constexpr size_t kMagicBytes = 8;
};

// Numbers and enumerators take as many bytes as their types.
class FieldWriter {
 public:
  explicit FieldWriter(const FileKind& kind) {
    text(kind.magic, FileKind::kMagicBytes);
    put(kind.version);
  }
  template <class... T>
  void put(T... values) {
    (number(static_cast<uint64_t>(values), sizeof(T)), ...);
  }
  void text(std::string_view value, size_t width);  // zeros follow
  std::vector<std::byte>& bytes() { return bytes_; }
  std::vector<std::byte> seal();  // ends it

 private:
  void number(uint64_t value, size_t bytes);
  std::vector<std::byte> bytes_;
};

class FieldReader {
 public:
  FieldReader(const std::string& where, std::span<const std::byte> bytes)
      : where_(where), bytes_(bytes) {}

  uint32_t check_kind(const FileKind& kind);  // returns the version
  template <class... T>
  void get(T&... values) {
    ((values = static_cast<T>(number(sizeof(T)))), ...);
  }
  std::string text(size_t width);  // without the zeros behind it
  const std::string& where() const { return where_; }

 private:
  std::span<const std::byte> take(size_t count);
  uint64_t number(size_t bytes);

  const std::string& where_;
  std::span<const std::byte> bytes_;
};

// The checksum behind sealed bytes must be theirs.
void check_seal(const std::string& where, const std::string& what,
                std::span<const std::byte> sealed);

// Bytes to read, in a file or in memory.
class Source {
 public:
  explicit Source(std::string where) : where_(std::move(where)) {}
  Source(const Source&) = delete;
  Source& operator=(const Source&) = delete;
  virtual ~Source() = default;

  virtual uint64_t size() const = 0;
  virtual void read(uint64_t offset, std::span<std::byte> to) const = 0;
  std::vector<std::byte> read(uint64_t offset, uint64_t bytes) const;
  uint64_t checksum(uint64_t begin, uint64_t end) const;  // takes little memory
  const std::string& where() const { return where_; }

 private:
  std::string where_;
};

class BytesSource final : public Source {
 public:
  BytesSource(std::string where, std::span<const std::byte> bytes)
      : Source(std::move(where)), bytes_(bytes) {}
  uint64_t size() const override { return bytes_.size(); }
  using Source::read;
  void read(uint64_t offset, std::span<std::byte> to) const override;

 private:
  std::span<const std::byte> bytes_;
};

// An open file, or none.
class Descriptor {
 public:
  explicit Descriptor(int fd = -1) : fd_(fd) {}
  Descriptor(Descriptor&& other) noexcept;
  Descriptor& operator=(Descriptor&& other) noexcept;
  ~Descriptor();
  int get() const { return fd_; }
  int close();  // errno, or 0

 private:
  int fd_;
};

class FileSource final : public Source {
 public:
  FileSource(const char* op, const std::string& path);
  uint64_t size() const override { return size_; }
  using Source::read;
  void read(uint64_t offset, std::span<std::byte> to) const override;

 private:
  Descriptor file_;
  uint64_t size_ = 0;
};

// A file that is at its path as a whole or not at all: written beside it under a temporary name,
// and renamed when it is on the disk. It has the mode of the file that it replaces; a new one is
// its owner's alone. A temporary file is locked while somebody writes it: one that is not was left
// by a process that was killed, and the next file for the same path removes it.
class NewFile {
 public:
  NewFile(const char* op, const std::string& path);
  NewFile(const NewFile&) = delete;
  NewFile& operator=(const NewFile&) = delete;
  ~NewFile();  // removes what was not committed

  void resize(uint64_t bytes);  // what is not written reads as zeros
  void write_at(uint64_t offset, std::span<const std::byte> bytes);
  void commit();  // throws, or the file is there

 private:
  [[noreturn]] void failed(const char* what, int error) const;
  void open_folder();
  void open_temporary();
  bool create(const std::string& name);
  bool is_in_place() const;
  void keep_mode() const;
  std::string temporary_name(int number) const;
  bool remove_left(const std::string& name) const;

  std::string op_;
  std::string path_;
  std::string name_;  // in the folder
  bool locked_ = false;
  std::string temporary_;  // empty: nothing to remove
  Descriptor folder_, file_;
};

}  // namespace gyre
