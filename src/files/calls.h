#pragma once
// The system calls behind files, in one table, so that a test can make any of them fail.

#include <sys/stat.h>
#include <sys/types.h>

#include <cerrno>
#include <cstddef>

namespace gyre {

struct FileCalls {
  int (*open_at)(int folder, const char* name, int flags, mode_t mode);
  int (*close)(int fd);
  int (*stat)(int fd, struct stat* facts);
  int (*stat_at)(int folder, const char* name, struct stat* facts, int flags);
  char* (*real_path)(const char* path, char* to);  // to: PATH_MAX bytes
  ssize_t (*read_at)(int fd, void* to, size_t bytes, off_t offset);
  ssize_t (*write_at)(int fd, const void* from, size_t bytes, off_t offset);
  int (*resize)(int fd, off_t bytes);
  int (*sync)(int fd);
  int (*lock)(int fd, int operation);
  int (*change_mode)(int fd, mode_t mode);
  int (*change_group)(int fd, gid_t group);
  int (*rename_at)(int folder, const char* from, const char* to);
  int (*remove_at)(int folder, const char* name);
};

const FileCalls& system_file_calls();
// What the library uses: the system's, unless a test sets others (null: the system's again).
const FileCalls& file_calls();
void set_file_calls(const FileCalls* calls);

// Calls until it was not a signal that ended it.
template <class Call>
auto uninterrupted(const Call& call) {
  auto result = call();
  while (result < 0 && errno == EINTR) result = call();
  return result;
}

}  // namespace gyre
