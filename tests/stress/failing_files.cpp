#include "stress/failing_files.h"

#include <cerrno>

namespace gyre::test {
namespace {

struct Now {
  uint64_t at = 0;
  int error = 0;
  uint64_t calls = 0, open_files = 0, bytes_read = 0;
  bool renamed = false;
  bool interrupted = false;  // the call before was answered with EINTR
};
Now now;

// Whether this call fails; sets errno.
bool fails(bool restartable) {
  if (now.error == EINTR) {  // every call that may be interrupted is, once
    if (restartable && !now.interrupted) {
      now.interrupted = true;
      errno = EINTR;
      return true;
    }
    now.interrupted = false;
    return false;
  }
  if (now.calls++ != now.at) return false;
  errno = now.error;
  return true;
}

const FileCalls& real() { return system_file_calls(); }

const FileCalls kFailing = {
    .open_at =
        [](int folder, const char* name, int flags, mode_t mode) {
          if (fails(true)) return -1;
          const int fd = real().open_at(folder, name, flags, mode);
          now.open_files += fd >= 0 ? 1 : 0;
          return fd;
        },
    .close =
        [](int fd) {
          --now.open_files;
          const int result = real().close(fd);
          return fails(false) ? -1 : result;
        },
    .stat = [](int fd, struct stat* facts) { return fails(false) ? -1 : real().stat(fd, facts); },
    .stat_at =
        [](int folder, const char* name, struct stat* facts, int flags) {
          return fails(false) ? -1 : real().stat_at(folder, name, facts, flags);
        },
    .real_path = [](const char* path,
                    char* to) { return fails(false) ? nullptr : real().real_path(path, to); },
    // Half of what was asked for is a success, too.
    .read_at = [](int fd, void* to, size_t bytes, off_t offset) -> ssize_t {
      if (fails(true)) return -1;
      const ssize_t got = real().read_at(fd, to, (bytes + 1) / 2, offset);
      now.bytes_read += got > 0 ? static_cast<uint64_t>(got) : 0;
      return got;
    },
    .write_at = [](int fd, const void* from, size_t bytes, off_t offset) -> ssize_t {
      return fails(true) ? -1 : real().write_at(fd, from, (bytes + 1) / 2, offset);
    },
    .resize = [](int fd, off_t bytes) { return fails(true) ? -1 : real().resize(fd, bytes); },
    .sync = [](int fd) { return fails(true) ? -1 : real().sync(fd); },
    .lock = [](int fd, int operation) { return fails(true) ? -1 : real().lock(fd, operation); },
    .change_mode = [](int fd,
                      mode_t mode) { return fails(false) ? -1 : real().change_mode(fd, mode); },
    .change_group = [](int fd,
                       gid_t group) { return fails(false) ? -1 : real().change_group(fd, group); },
    .rename_at =
        [](int folder, const char* from, const char* to) {
          if (fails(false)) return -1;
          const int result = real().rename_at(folder, from, to);
          now.renamed = now.renamed || result == 0;
          return result;
        },
    .remove_at =
        [](int folder, const char* name) {
          return fails(false) ? -1 : real().remove_at(folder, name);
        },
};

}  // namespace

FailingFiles::FailingFiles(uint64_t at, int error) {
  now = Now{};
  now.at = at;
  now.error = error;
  set_file_calls(&kFailing);
}
FailingFiles::~FailingFiles() { set_file_calls(nullptr); }

uint64_t FailingFiles::calls() const { return now.calls; }
bool FailingFiles::renamed() const { return now.renamed; }
uint64_t FailingFiles::open_files() const { return now.open_files; }
uint64_t FailingFiles::bytes_read() const { return now.bytes_read; }

}  // namespace gyre::test
