"""What the tests expect of the machine that they run on."""

import shutil

HAS_COMPILER = any(map(shutil.which, ("c++", "g++", "clang++")))
# What `--engine auto` takes for linear attention in float32.
FASTEST_ENGINE = "native" if HAS_COMPILER else "textbook"
