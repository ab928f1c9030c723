#pragma once
// Plain data shared by the host and every device compiler. NVRTC has no <cstdint>.
#if defined(__CUDACC_RTC__)
using int8_t = signed char;
using uint8_t = unsigned char;
using uint16_t = unsigned short;
using int32_t = int;
using uint32_t = unsigned int;
using int64_t = long long;
using uint64_t = unsigned long long;
#else
#include <cstdint>
#endif
