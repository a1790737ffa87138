// A short text that takes no memory from the heap. What does not fit is cut off.
#pragma once

#include <cstdint>
#include <cstring>

namespace {

class Text {
public:
    Text(const char* from = "") { *this << from; }

    const char* letters() const { return memory; }
    bool empty() const { return !*memory; }
    bool operator==(const char* other) const { return !std::strcmp(memory, other); }

    Text& operator<<(const char* more) {
        for (; *more && length + 1 < sizeof memory; more++) memory[length++] = *more;
        memory[length] = 0;
        return *this;
    }

    Text& operator<<(int64_t number) {
        char digits[24], *first = digits + sizeof digits - 1;
        *first = 0;
        for (uint64_t rest = number < 0 ? -static_cast<uint64_t>(number) : number; rest || !*first; rest /= 10)
            *--first = static_cast<char>('0' + rest % 10);
        return *this << (number < 0 ? "-" : "") << first;
    }

    Text& operator<<(const Text& more) { return *this << more.memory; }

private:
    char memory[120];
    size_t length = 0;
};

}  // namespace
