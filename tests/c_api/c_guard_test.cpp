// What becomes of exceptions at the boundary, and whose message is whose.
#include <gyre/gyre_c.h>

#include <new>
#include <stdexcept>
#include <thread>

#include "c_api/guard.h"
#include "gyre_test.h"

namespace gyre::c_api {
namespace {

template <class Thrown>
gyre_status status_of(const Thrown& thrown) {
  return guard("gyre_call", [&] { throw thrown; });
}

TEST(CGuard, EveryExceptionHasAStatusAndAMessage) {
  EXPECT_EQ(guard("gyre_call", [] {}), GYRE_OK);
  EXPECT_EQ(status_of(std::bad_alloc()), GYRE_OUT_OF_MEMORY);
  EXPECT_STREQ(gyre_last_error(), "gyre_call: the host's memory is exhausted");
  EXPECT_EQ(status_of(std::length_error("vector")), GYRE_OUT_OF_MEMORY);
  EXPECT_EQ(status_of(std::logic_error("a mistake")), GYRE_INTERNAL);
  EXPECT_STREQ(gyre_last_error(), "gyre_call: a mistake");
  EXPECT_EQ(status_of(3), GYRE_INTERNAL);
  EXPECT_STREQ(gyre_last_error(), "gyre_call: an exception of unknown type");
  for (const auto code :
       {ErrorCode::invalid_argument, ErrorCode::unsupported, ErrorCode::out_of_memory,
        ErrorCode::compile_failed, ErrorCode::device_lost, ErrorCode::io}) {
    EXPECT_EQ(gyre_status_name(status_of(Error(code, "op: rule"))), name(code));
    EXPECT_STREQ(gyre_last_error(), "op: rule");
  }
}

TEST(CGuard, MessagesBelongToTheThread) {
  status_of(std::logic_error("mine"));
  std::thread([] {
    EXPECT_STREQ(gyre_last_error(), "");
    status_of(std::logic_error("its own"));
    EXPECT_STREQ(gyre_last_error(), "gyre_call: its own");
  }).join();
  EXPECT_STREQ(gyre_last_error(), "gyre_call: mine");
}

// A format that C++ gets needs a number in gyre/c/base.h.
TEST(CGuard, EveryFormatHasItsNumber) {
  const std::map<std::string_view, gyre_kv_format> numbers = {{"f32", GYRE_KV_F32},
                                                              {"f16", GYRE_KV_F16},
                                                              {"bf16", GYRE_KV_BF16},
                                                              {"tq2", GYRE_KV_TQ2},
                                                              {"tq3", GYRE_KV_TQ3},
                                                              {"tq4", GYRE_KV_TQ4},
                                                              {"tq5", GYRE_KV_TQ5},
                                                              {"tq6", GYRE_KV_TQ6},
                                                              {"tq8", GYRE_KV_TQ8},
                                                              {"mlx_native4", GYRE_KV_MLX_NATIVE4},
                                                              {"mlx_native5", GYRE_KV_MLX_NATIVE5},
                                                              {"mlx_native6", GYRE_KV_MLX_NATIVE6},
                                                              {"mlx_native8", GYRE_KV_MLX_NATIVE8}};
  EXPECT_EQ(numbers.size(), kv_formats().size());
  for (const KvFormat format : kv_formats()) {
    gyre_kv_format number = 0;
    const char* back = nullptr;
    ASSERT_EQ(gyre_kv_format_from_name(name(format).data(), &number), GYRE_OK);
    EXPECT_EQ(number, numbers.at(name(format)));
    ASSERT_EQ(gyre_kv_format_name(number, &back), GYRE_OK);
    EXPECT_EQ(back, name(format));
  }
}

}  // namespace
}  // namespace gyre::c_api
