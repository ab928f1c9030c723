#pragma once

#include <memory>

#include "cuda/stream.h"

namespace gyre::cuda {

std::unique_ptr<GraphImpl> make_graph(std::shared_ptr<Stream> stream, TraceLog& trace,
                                      CommandList list);

}  // namespace gyre::cuda
