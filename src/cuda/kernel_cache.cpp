#include "cuda/kernel_cache.h"

#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <bit>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <sstream>

#include "runtime/require.h"

namespace gyre::cuda {
namespace {

constexpr uint64_t kMagic = 0x316C656B65727967u;  // also the format's version

struct Header {
  uint64_t magic, first, second;  // the key again: a renamed file is not another entry
  uint64_t symbol_bytes, cubin_bytes;
  uint64_t check;  // of symbol and cubin
};

std::string variable(const char* name) {
  const char* const value = std::getenv(name);
  return value != nullptr ? value : "";
}

std::string default_folder() {
  // The rules of XDG: a relative path is to be ignored.
  const std::string cache = variable("XDG_CACHE_HOME"), home = variable("HOME");
  if (cache.starts_with('/')) return cache + "/gyre";
  if (home.starts_with('/')) return home + "/.cache/gyre";
  return {};
}

uint64_t check_of(std::string_view symbol, std::string_view cubin) {
  CacheKey key;
  key.add(symbol);
  key.add(cubin);
  return key.first() ^ key.second();
}

std::string_view view(const std::vector<char>& bytes) { return {bytes.data(), bytes.size()}; }

std::string entry(const std::string& folder, const CacheKey& key) {
  return folder + "/" + key.text() + ".cubin";
}

// And those above it; where one cannot be made, opening the file fails.
void make_folders(const std::string& folder) {
  for (size_t end = folder.find('/', 1); end != std::string::npos; end = folder.find('/', end + 1))
    mkdir(folder.substr(0, end).c_str(), 0777);
  mkdir(folder.c_str(), 0777);
}

std::optional<CompiledKernel> load_entry(const std::string& folder, const CacheKey& key) {
  const std::string path = entry(folder, key);
  struct stat found {};
  if (stat(path.c_str(), &found) != 0) return std::nullopt;
  const auto bytes = static_cast<uint64_t>(found.st_size);
  if (bytes < sizeof(Header)) return std::nullopt;
  std::ifstream file(path, std::ios::binary);
  Header header{};
  file.read(reinterpret_cast<char*>(&header), sizeof header);
  const bool ours =
      header.magic == kMagic && header.first == key.first() && header.second == key.second();
  const uint64_t payload = bytes - sizeof header;
  if (!file || !ours || header.symbol_bytes > payload ||
      header.cubin_bytes != payload - header.symbol_bytes)
    return std::nullopt;
  CompiledKernel kernel;
  kernel.from_cache = true;
  kernel.symbol.resize(header.symbol_bytes);
  kernel.cubin.resize(header.cubin_bytes);
  file.read(kernel.symbol.data(), static_cast<std::streamsize>(header.symbol_bytes));
  file.read(kernel.cubin.data(), static_cast<std::streamsize>(header.cubin_bytes));
  if (!file || check_of(kernel.symbol, view(kernel.cubin)) != header.check) return std::nullopt;
  return kernel;
}

}  // namespace

void CacheKey::add_byte(uint8_t byte) {
  first_ = (first_ ^ byte) * 0x100000001B3u;
  second_ = std::rotl(second_ + byte, 23) * 0xD6E8FEB86659FD93u;
  second_ ^= second_ >> 32;
}

void CacheKey::add(std::string_view part) {
  // The length first: parts cannot run into each other.
  const uint64_t bytes = part.size();
  for (uint32_t shift = 0; shift < 64; shift += 8) add_byte(static_cast<uint8_t>(bytes >> shift));
  for (const char c : part) add_byte(static_cast<uint8_t>(c));
}

std::string CacheKey::text() const {
  constexpr std::string_view kDigits = "0123456789abcdef";
  std::string text;
  for (const uint64_t half : {first_, second_}) {
    for (int shift = 60; shift >= 0; shift -= 4) text += kDigits[half >> shift & 15];
  }
  return text;
}

KernelCache::KernelCache(const std::string& option) {
  const std::string wanted = option.empty() ? variable("GYRE_KERNEL_CACHE") : option;
  if (wanted == "off") return;
  folder_ = wanted.empty() ? default_folder() : wanted;
  std::istringstream folders(variable("GYRE_KERNEL_PATH"));
  for (std::string folder; std::getline(folders, folder, ':');) {
    if (!folder.empty()) carried_.emplace_back(folder);
  }
}

std::optional<CompiledKernel> KernelCache::load(const CacheKey& key) const {
  if (!folder_.empty()) {
    if (std::optional<CompiledKernel> kernel = load_entry(folder_, key)) return kernel;
  }
  for (const std::string& folder : carried_) {
    if (std::optional<CompiledKernel> kernel = load_entry(folder, key)) return kernel;
  }
  return std::nullopt;
}

void KernelCache::store(const CacheKey& key, const CompiledKernel& kernel) const {
  if (folder_.empty()) return;
  static std::atomic<uint64_t> next{0};
  make_folders(folder_);
  const std::string path = entry(folder_, key);
  // A name that no other writer has; the rename is atomic.
  const std::string draft = join(path, ".", getpid(), ".", next.fetch_add(1), ".part");
  const Header header{kMagic,
                      key.first(),
                      key.second(),
                      kernel.symbol.size(),
                      kernel.cubin.size(),
                      check_of(kernel.symbol, view(kernel.cubin))};
  std::ofstream file(draft, std::ios::binary);
  file.write(reinterpret_cast<const char*>(&header), sizeof header);
  file.write(kernel.symbol.data(), static_cast<std::streamsize>(kernel.symbol.size()));
  file.write(kernel.cubin.data(), static_cast<std::streamsize>(kernel.cubin.size()));
  file.close();
  if (!file || std::rename(draft.c_str(), path.c_str()) != 0) unlink(draft.c_str());
}

}  // namespace gyre::cuda
