// The functions of runner.h for WebAssembly. demo/build.py compiles this file.

#define LINTX_ONLY_INT8
#define LINTX_INLINE inline  // without always_inline, only the files compiled for speed inline the functions of maths.h

// Loops over rows and heads are compiled for size: otherwise they inline all code that they call, and compile it for
// speed. The code that a page runs most is compiled for speed: lanes.h, sums.h, and the operations of the shipped
// models and of softmax attention, except look-ups, which take little time.
#define LINTX_BEGIN_SMALL _Pragma("clang attribute push(__attribute__((minsize)), apply_to = function)")
#define LINTX_END_SMALL _Pragma("clang attribute pop")
#include "ops/parts/lanes.h"
LINTX_BEGIN_SMALL
#include "program.h"
LINTX_END_SMALL
#include "inversion.h"
#include "ops/parts/sums.h"
LINTX_BEGIN_SMALL
#include "operation.h"
#include "ops/look_up.h"
#include "ops/parts/features.h"
LINTX_END_SMALL
#include "ops/join.h"
#include "ops/linear.h"
#include "ops/project.h"
#include "ops/softmax.h"
LINTX_BEGIN_SMALL
#include "runner.cpp"
#include "runtime.cpp"  // instead of the C++ library
LINTX_END_SMALL
