// What a library was built from, and the instruction sets that the processor supports; library.py calls it.

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace {

template <class... Bits>
bool has(uint64_t word, Bits... bits) {
    return ((word >> bits & 1) && ...);
}

#if defined(__x86_64__)

struct Registers {
    uint32_t a, b, c, d;
};

Registers ask(uint32_t leaf) {
    Registers found{};
    if (__get_cpuid_max(leaf & 0x80000000, nullptr) >= leaf) __cpuid_count(leaf, 0, found.a, found.b, found.c, found.d);
    return found;
}

// Whether the operating system saves the registers of `mask`: 0x06 for AVX, 0xe6 for AVX-512.
bool saves(uint32_t mask) {
    uint32_t low, high;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (low & mask) == mask;
}

bool supports_v3() {
    return has(ask(1).c, 0, 9, 12, 13, 19, 20) &&                     // SSE3, SSSE3, FMA, CMPXCHG16B, SSE4.1, SSE4.2
           has(ask(1).c, 22, 23, 27, 28, 29) &&                       // MOVBE, POPCNT, OSXSAVE, AVX, F16C
           has(ask(7).b, 3, 5, 8) && has(ask(0x80000001).c, 0, 5) &&  // BMI1, AVX2, BMI2; LAHF, LZCNT
           saves(0x06);
}

bool supports_v4() {
    return supports_v3() && has(ask(7).b, 16, 17, 28, 30, 31) &&  // AVX-512 F, DQ, CD, BW, VL
           has(ask(7).c, 11) && saves(0xe6);                      // AVX-512 VNNI
}

#elif defined(__aarch64__)

bool supports_dot_products() {
#if defined(__linux__)
    return has(getauxval(AT_HWCAP), 7, 8, 12, 20);  // CRC32, atomics, ASIMDRDM, ASIMDDP
#elif defined(__APPLE__)
    int found = 0;
    size_t size = sizeof found;
    return !sysctlbyname("hw.optional.arm.FEAT_DotProd", &found, &size, nullptr, 0) && found;
#else
    return false;
#endif
}

#endif

}  // namespace

extern "C" {

// The digest of the sources and options, which build.py also finds in the file.
const char* lintx_digest() { return "lintx library " LINTX_DIGEST; }

// Whether this processor can run the library of an instruction set.
int64_t lintx_supports(const char* name) {
#if defined(__x86_64__)
    if (!std::strcmp(name, "x86-64-v3")) return supports_v3();
    if (!std::strcmp(name, "x86-64-v4")) return supports_v4();
#elif defined(__aarch64__)
    if (!std::strcmp(name, "aarch64-dotprod")) return supports_dot_products();
#endif
    return std::strchr(name, '-') == std::strrchr(name, '-');  // the architecture's own set, such as x86-64
}
}
