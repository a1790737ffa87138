// Prints whether the processor supports the instruction set that the argument names, for test_other_machines.py.

#include <cstdio>

#include "library.cpp"

int main(int, char** words) {
    std::puts(lintx_supports(words[1]) ? "yes" : "no");
    return 0;
}
