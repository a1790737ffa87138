// The functions of runner.h for WebAssembly. demo/build.py compiles this file.

#define LINTX_ONLY_INT8

// These files take most of the time of the shipped models and of softmax attention, so they are compiled for speed.
#include "inversion.h"
#include "ops/join.h"
#include "ops/look_up.h"
#include "ops/mix_linear.h"
#include "ops/mix_rows.h"
#include "ops/project.h"

// Everything else is compiled for size.
#pragma clang attribute push(__attribute__((minsize)), apply_to = function)
#include "runner.cpp"
#pragma clang attribute pop

// The C++ library calls this function if it cannot continue. Its own version would add printf to the engine, and printf
// would need functions that a page does not have.
namespace std {
inline namespace __1 {
[[noreturn]] void __libcpp_verbose_abort(const char*, ...) noexcept { __builtin_trap(); }
}  // namespace __1
}  // namespace std
