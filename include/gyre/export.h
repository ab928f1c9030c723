#pragma once

// What the shared library exports; everything else of it is hidden. Plain C.
#define GYRE_API __attribute__((visibility("default")))
// Classes inside an exported class that are the library's own.
#define GYRE_LOCAL __attribute__((visibility("hidden")))
