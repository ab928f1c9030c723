#include <cstdio>
#include <iterator>
#include <new>
#include <string>

#include "c_api/handles.h"
#include "gyre/version.h"

namespace gyre::c_api {
namespace {

thread_local const char* last_error = "";

// A program that ends may call once more when its thread's objects are gone.
thread_local bool is_thread_over = false;
thread_local char short_message[256];
struct Message {
  std::string text;
  ~Message() {
    is_thread_over = true;
    last_error = "";
  }
};
thread_local Message last_message;

gyre_status store(gyre_status status, const char* prefix, const char* separator,
                  const char* message) noexcept {
  if (is_thread_over) {
    std::snprintf(short_message, sizeof short_message, "%s%s%s", prefix, separator, message);
    last_error = short_message;
    return status;
  }
  try {
    last_message.text = std::string(prefix) + separator + message;
    last_error = last_message.text.c_str();
  } catch (...) {
    last_error = "out of memory";
  }
  return status;
}

}  // namespace

const char* name_of(HandleKind kind) {
  constexpr const char* kNames[] = {
      "a gyre_device",   "a gyre_device_list", "a gyre_tensor",        "a gyre_encoder",
      "a gyre_fence",    "a gyre_graph",       "a gyre_custom_kernel", "a gyre_kv_buffer",
      "a gyre_kv_pages", "a gyre_kv_cache",    "a gyre_kv_pool",       "a gyre_kv_sequence",
      "a gyre_kv_batch", "a gyre_bytes"};
  const uint64_t number = static_cast<uint64_t>(kind) - static_cast<uint64_t>(HandleKind::device);
  return number < std::size(kNames) ? kNames[number]
                                    : "no handle of Gyre's, or one that was destroyed";
}

gyre_status keep_error(const char* function) noexcept {
  try {
    throw;
  } catch (const Refusal& refusal) {
    return store(GYRE_INVALID_ARGUMENT, function, ": ", refusal.message.c_str());
  } catch (const Error& error) {
    return store(static_cast<gyre_status>(error.code()) + 1, "", "", error.what());
  } catch (const std::bad_alloc&) {
    return store(GYRE_OUT_OF_MEMORY, function, ": ", "the host's memory is exhausted");
  } catch (const std::length_error&) {
    return store(GYRE_OUT_OF_MEMORY, function, ": ", "larger than memory can be");
  } catch (const std::exception& error) {
    return store(GYRE_INTERNAL, function, ": ", error.what());
  } catch (...) {
    return store(GYRE_INTERNAL, function, ": ", "an exception of unknown type");
  }
}

}  // namespace gyre::c_api

using namespace gyre::c_api;

static_assert(GYRE_INVALID_ARGUMENT == static_cast<int>(gyre::ErrorCode::invalid_argument) + 1 &&
              GYRE_IO == static_cast<int>(gyre::ErrorCode::io) + 1);

uint32_t gyre_abi_version() { return GYRE_ABI_VERSION; }
const char* gyre_version() { return gyre::version().data(); }

const char* gyre_status_name(gyre_status status) {
  if (status == GYRE_OK) return "ok";
  if (status == GYRE_INTERNAL) return "internal";
  if (status < GYRE_OK || status > GYRE_IO) return "no gyre_status";
  return gyre::name(static_cast<gyre::ErrorCode>(status - 1)).data();
}

const char* gyre_last_error() { return last_error; }

gyre_status gyre_bytes_get(const gyre_bytes* bytes, const void** data, uint64_t* size) {
  return guard(__func__, [&] {
    const std::string& value = deref(bytes, "bytes").value;
    deref(data, "data");
    deref(size, "size") = value.size();
    *data = value.data();
  });
}

void gyre_bytes_destroy(gyre_bytes* bytes) { destroy(__func__, bytes, "bytes"); }
