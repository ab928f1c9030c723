#include "cuda/sources.h"

#include <algorithm>

namespace gyre::cuda {
namespace {

constexpr std::string_view kFolder = "cuda/kernels/";

const std::vector<SourceFile>& all_files() {
  static const std::vector<SourceFile> kFiles = [] {
    std::vector<SourceFile> files;
    for (const EmbeddedFile& file : embedded_files()) {
      std::string text;
      for (const std::string_view part : file.parts) text += part;
      files.push_back({file.name, std::move(text)});
    }
    return files;
  }();
  return kFiles;
}

const SourceFile* find(std::string_view name) {
  const std::vector<SourceFile>& files = all_files();
  const auto found =
      std::ranges::find_if(files, [&](const SourceFile& file) { return file.name == name; });
  return found != files.end() ? &*found : nullptr;
}

// Names between quotes are those of our files; others are the compiler's.
void add_headers(std::string_view text, std::vector<const SourceFile*>& headers) {
  constexpr std::string_view kInclude = "#include \"";
  for (size_t at = text.find(kInclude); at != text.npos; at = text.find(kInclude, at)) {
    at += kInclude.size();
    const SourceFile* const header = find(text.substr(at, text.find('"', at) - at));
    if (header == nullptr || std::ranges::find(headers, header) != headers.end()) continue;
    headers.push_back(header);
    add_headers(header->text, headers);
  }
}

}  // namespace

KernelSources kernel_sources(std::string_view file) {
  KernelSources sources{find(std::string(kFolder) + std::string(file)), {}};
  if (sources.source != nullptr) add_headers(sources.source->text, sources.headers);
  return sources;
}

}  // namespace gyre::cuda
