#pragma once

#include <string>

#include "cache/snapshot.h"

namespace gyre {

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

class FileSource final : public SnapshotSource {
 public:
  FileSource(const char* op, const std::string& path);
  uint64_t size() const override { return size_; }
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
