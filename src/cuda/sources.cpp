#include "cuda/sources.h"

#include <algorithm>

namespace gyre::cuda {
namespace {

constexpr std::string_view kFolder = "cuda/kernels/";

bool is_source(std::string_view name) { return name.ends_with(".cu"); }

std::vector<SourceFile> collect(bool sources) {
  std::vector<SourceFile> files;
  for (const EmbeddedFile& file : embedded_files()) {
    const std::string_view name = file.name;
    if (is_source(name) != sources) continue;
    std::string text;
    for (const std::string_view piece : file.pieces) text += piece;
    files.push_back({std::string(name), std::move(text)});
  }
  return files;
}

}  // namespace

const std::vector<SourceFile>& kernel_headers() {
  static const std::vector<SourceFile> kHeaders = collect(false);
  return kHeaders;
}

const SourceFile* kernel_source(std::string_view file) {
  static const std::vector<SourceFile> kSources = collect(true);
  const auto found = std::find_if(kSources.begin(), kSources.end(), [&](const SourceFile& source) {
    return source.name.starts_with(kFolder) && source.name.substr(kFolder.size()) == file;
  });
  return found != kSources.end() ? &*found : nullptr;
}

}  // namespace gyre::cuda
