// The functions of runner.h for WebAssembly. demo/build.py compiles this file.

#include "runner.cpp"

// The C++ library calls this function if it cannot continue. Its own version would add printf to the engine, and printf
// would need functions that a page does not have.
namespace std {
inline namespace __1 {
[[noreturn]] void __libcpp_verbose_abort(const char*, ...) noexcept { __builtin_trap(); }
}  // namespace __1
}  // namespace std
