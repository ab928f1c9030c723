#include "gyre/custom_kernel.h"

#include <utility>

#include "runtime/kernel_code.h"
#include "runtime/recorder.h"
#include "runtime/require.h"

namespace gyre {
namespace {

constexpr uint64_t kMaxParams = 1024;

static_assert(Access::read == kArgRead && Access::write == kArgWrite &&
              Access::read_write == kArgReadWrite);

uint64_t padded(uint64_t params_bytes) { return (params_bytes + 7) / 8 * 8; }

void check_code(const CustomCode& code) {
  require(!code.name.empty(), "custom_kernel: a kernel must have a name");
  const auto rule = [&](bool holds, const auto&... what) {
    require(holds, "custom_kernel: ", code.name, ": ", what...);
  };
  rule(!code.args.empty() && code.args.size() <= kMaxArgs, "there must be from 1 to ", kMaxArgs,
       " arguments, got ", code.args.size());
  for (const CustomArg& arg : code.args) {
    rule(!arg.name.empty(), "every argument must have a name");
    rule(arg.access <= Access::read_write, arg.name, ": no such access: ", int(arg.access));
  }
  rule(code.params_bytes != 0 && code.params_bytes <= kMaxParams, "params must have from 1 to ",
       kMaxParams, " bytes, got ", code.params_bytes);
  rule(code.cuda.source.empty() == code.cuda.name.empty(),
       "CUDA code needs both its source and the kernel's name in it");
  rule(code.metal.source.empty() == code.metal.name.empty(),
       "Metal code needs both its source and the kernel's name in it");
  rule(code.cpu != nullptr || !code.cuda.source.empty() || !code.metal.source.empty(),
       "there must be code for some device");
}

void check_launch(const CustomCode& code, const CustomLaunch& launch) {
  constexpr uint32_t kMaxX = 0x7FFFFFFF, kMaxYZ = 65535, kMaxThreads = 1024;
  require(launch.block <= kMaxThreads, code.name, ": a block has at most ", kMaxThreads,
          " threads, got ", launch.block);
  require(launch.grid[0] <= kMaxX && launch.grid[1] <= kMaxYZ && launch.grid[2] <= kMaxYZ,
          code.name, ": a grid has at most ", kMaxX, " x ", kMaxYZ, " x ", kMaxYZ, " blocks, got ",
          launch.grid[0], " x ", launch.grid[1], " x ", launch.grid[2]);
}

}  // namespace

CustomKernel::CustomKernel(CustomCode code) try {
  check_code(code);
  auto made = std::make_shared<KernelCode>();
  made->code = std::move(code);
  const CustomCode& kept = made->code;
  made->info = {
      .name = kept.name.c_str(),
      .params_bytes = static_cast<uint32_t>(padded(kept.params_bytes) + sizeof(CustomLaunch)),
      .arg_count = static_cast<uint32_t>(kept.args.size()),
      .code = made.get()};
  for (size_t i = 0; i < kept.args.size(); ++i)
    made->info.args[i] = {kept.args[i].name.c_str(), kept.args[i].access};
  // Handles are counted by themselves: pipelines hold the code, too.
  const auto handle = std::make_shared<std::shared_ptr<const KernelCode>>(made);
  made->handles = handle;
  code_ = {handle, made.get()};
} catch (const std::bad_alloc&) {
  out_of_memory("custom_kernel");
}

const KernelCode& CustomKernel::code() const {
  require(code_ != nullptr, "custom_kernel: used after it was moved from");
  return *code_;
}

const std::string& CustomKernel::name() const { return code().code.name; }

bool supports(const Device& device, const CustomKernel& kernel) {
  require(impl_of(device) != nullptr, "supports: the device was moved from");
  const KernelCode& code = kernel.code();
  return impl_of(device)->has(code.info, padded(code.code.params_bytes));
}

void CustomKernel::record(Encoder& encoder, std::span<const std::byte> params,
                          std::span<const Tensor> args, const CustomLaunch& launch) const try {
  const KernelCode& kernel = this->code();
  const CustomCode& code = kernel.code;
  Recording recording(encoder, code.name.c_str());
  require(params.size() == code.params_bytes, code.name, ": params have ", code.params_bytes,
          " bytes, got ", params.size());
  require(args.size() == code.args.size(), code.name, ": there are ", code.args.size(),
          " arguments, got ", args.size());
  check_launch(code, launch);
  if (!supports(encoder.device(), *this))
    fail(ErrorCode::unsupported, code.name, ": there is no code for device ",
         encoder.device().info().name);
  const uint64_t spec = padded(code.params_bytes);
  std::array<std::byte, kMaxParams + sizeof(launch)> bytes{};
  std::memcpy(bytes.data(), params.data(), params.size());
  std::memcpy(bytes.data() + spec, &launch, sizeof(launch));
  std::array<const Tensor*, kMaxArgs> pointers{};
  for (size_t i = 0; i < args.size(); ++i) pointers[i] = &args[i];
  recording.dispatch(kernel.info, spec, bytes.data(), {pointers.data(), args.size()});
  recording.commit();
} catch (const std::bad_alloc&) {
  out_of_memory("custom_kernel.record");
}

}  // namespace gyre
