#include "files/calls.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>

namespace gyre {
namespace {

// On macOS fsync() leaves the bytes in the drive's cache. File systems without a full flush say so.
int sync_file(int fd) {
#if defined(__APPLE__)
  if (::fcntl(fd, F_FULLFSYNC) == 0) return 0;
  if (errno != ENOTSUP && errno != EOPNOTSUPP && errno != EINVAL && errno != ENOTTY) return -1;
#endif
  return ::fsync(fd);
}

constexpr FileCalls kSystem = {
    .open_at = [](int folder, const char* name, int flags,
                  mode_t mode) { return ::openat(folder, name, flags, mode); },
    .close = ::close,
    .stat = [](int fd, struct stat* facts) { return ::fstat(fd, facts); },
    .stat_at = [](int folder, const char* name, struct stat* facts,
                  int flags) { return ::fstatat(folder, name, facts, flags); },
    .real_path = [](const char* path, char* to) { return ::realpath(path, to); },
    .read_at = [](int fd, void* to, size_t bytes,
                  off_t offset) { return ::pread(fd, to, bytes, offset); },
    .write_at = [](int fd, const void* from, size_t bytes,
                   off_t offset) { return ::pwrite(fd, from, bytes, offset); },
    .resize = ::ftruncate,
    .sync = sync_file,
    .lock = ::flock,
    .change_mode = ::fchmod,
    .change_group = [](int fd, gid_t group) { return ::fchown(fd, static_cast<uid_t>(-1), group); },
    .rename_at = [](int folder, const char* from,
                    const char* to) { return ::renameat(folder, from, folder, to); },
    .remove_at = [](int folder, const char* name) { return ::unlinkat(folder, name, 0); },
};

std::atomic<const FileCalls*> current{&kSystem};

}  // namespace

const FileCalls& system_file_calls() { return kSystem; }
const FileCalls& file_calls() { return *current.load(std::memory_order_relaxed); }
void set_file_calls(const FileCalls* calls) { current = calls != nullptr ? calls : &kSystem; }

}  // namespace gyre
