// All that the compiled code needs of the C++ library. Builds with zig have this file instead of it, because zig would
// first compile the whole C++ library, which takes about as long as all other files. It would also add printf to the
// demo's engine, and printf would need functions that a page does not have.

#include <cstdint>
#include <cstdlib>
#include <new>

namespace std {

const nothrow_t nothrow{};

// Containers call this function if they cannot continue.
inline namespace __1 {
[[noreturn]] void __libcpp_verbose_abort(const char*, ...) noexcept { abort(); }
}  // namespace __1

}  // namespace std

void* operator new(size_t bytes) {
    void* memory = std::malloc(bytes ? bytes : 1);
    return memory ? memory : (std::abort(), nullptr);
}

void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }

// The word before aligned memory has the address that `free` takes.
void* operator new(size_t bytes, std::align_val_t alignment, const std::nothrow_t&) noexcept {
    const size_t multiple = static_cast<size_t>(alignment), before = multiple + sizeof(void*);
    char* memory = bytes <= SIZE_MAX - before ? static_cast<char*>(std::malloc(bytes + before)) : nullptr;
    if (!memory) return nullptr;
    char* aligned = memory + before - reinterpret_cast<uintptr_t>(memory + before) % multiple;
    reinterpret_cast<void**>(aligned)[-1] = memory;
    return aligned;
}

void operator delete(void* memory, std::align_val_t) noexcept {
    if (memory) std::free(static_cast<void**>(memory)[-1]);
}

#ifdef __linux__
extern "C" {
// Registers a destructor of a thread. The C library has this since glibc 2.18; before, a thread's memory stays.
[[gnu::weak]] int __cxa_thread_atexit_impl(void (*)(void*), void*, void*);
int __cxa_thread_atexit(void (*destroy)(void*), void* object, void* library) {
    return __cxa_thread_atexit_impl ? __cxa_thread_atexit_impl(destroy, object, library) : 0;
}
}
#endif
