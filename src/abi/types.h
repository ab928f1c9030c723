#pragma once
// Plain data shared by the host and every device compiler. NVRTC has no <cstdint>, Metal has the
// names in its standard library. Metal also wants to know where constants are and what references
// refer to: a command's Params (GYRE_PARAMS), or values that the calling thread has (GYRE_THREAD).
#if defined(__METAL_VERSION__)
#define GYRE_CONSTANT constant constexpr
#define GYRE_PARAMS constant
#define GYRE_THREAD thread
#else
#define GYRE_CONSTANT constexpr
#define GYRE_PARAMS
#define GYRE_THREAD
#endif

#if defined(__CUDACC_RTC__)
using int8_t = signed char;
using uint8_t = unsigned char;
using uint16_t = unsigned short;
using int32_t = int;
using uint32_t = unsigned int;
using int64_t = long long;
using uint64_t = unsigned long long;
#elif defined(__METAL_VERSION__)
#include <metal_stdlib>
#else
#include <cstdint>
#endif
