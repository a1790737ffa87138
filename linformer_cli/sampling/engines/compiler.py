"""Compiles `native.cpp` with the system's compiler on first use, in about a second, and keeps it in a cache."""

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from linformer_cli.errors import LintxError
from linformer_cli.files import user_cache
from linformer_cli.runtime import processor_name

SOURCE = Path(__file__).with_name("native.cpp")
# Fast math lets exponentials and sums be vectorised; it is left out when linking, where it would change how the whole
# process treats the smallest numbers.
COMPILE = ("-std=c++17", "-O3", "-march=native", "-ffast-math", "-fPIC", "-c")
LINK = ("-shared",)


_SIZE, _POINTER, _REAL = ctypes.c_int64, ctypes.c_void_p, ctypes.c_double
_SIGNATURES = {
    "embed": (*[_SIZE] * 5, *[_POINTER] * 5),
    "step": [_POINTER] * 3,
    "draw_categorical": (*[_SIZE] * 2, *[_POINTER] * 3),
    "draw_mixture": (*[_SIZE] * 3, *[_REAL] * 2, *[_POINTER] * 3),
    "mix": (*[_SIZE] * 4, *[_POINTER] * 5, _SIZE),
    "join": (*[_SIZE] * 2, *[_POINTER] * 6, _SIZE),
    "activate": (*[_SIZE] * 2, *[_POINTER] * 2, _SIZE),
}


class NoCompiler(LintxError):
    """The native engine cannot be had here; the message says why."""


def cache_folder() -> Path:
    """Where compiled libraries are kept; raises `NoCompiler` where there is no such place."""
    try:
        return user_cache() / "native"
    except LintxError as error:
        raise NoCompiler(str(error)) from None


@functools.cache
def load_library() -> ctypes.CDLL:
    """The compiled kernels; raises `NoCompiler` where there is no compiler or it fails."""
    compiler = next((found for name in ("c++", "g++", "clang++") if (found := shutil.which(name))), None)
    if compiler is None:
        raise NoCompiler("there is no C++ compiler (c++, g++ or clang++) on the PATH")
    threads = _threads_library()
    key = (SOURCE.read_bytes(), os.path.realpath(compiler), COMPILE, platform.machine(), processor_name(), str(threads))
    file = cache_folder() / f"{hashlib.sha256(repr(key).encode()).hexdigest()[:20]}.so"
    try:
        if not _is_whole(file):
            _compile(compiler, file, threads is not None)
        library = ctypes.CDLL(str(file))
        for name, signature in _SIGNATURES.items():
            function = getattr(library, f"lintx_{name}")
            function.argtypes, function.restype = signature, None
        return library
    except OSError as error:
        raise NoCompiler(f"the kernels cannot be compiled or loaded: {error.strerror or error}") from None


def describe_native_engine() -> str:
    """Where its compiled kernels are, or why there are none."""
    try:
        return f"compiled, in {load_library()._name}"
    except NoCompiler as error:
        return f"not to be had: {error}"


def _threads_library() -> str | None:
    """The OpenMP runtime that torch has loaded, made visible to ours: a second one would fight over the cores."""
    try:
        with open("/proc/self/maps", encoding="utf-8") as maps:
            paths = {line.split(maxsplit=5)[5].strip() for line in maps if "libgomp" in line}
    except OSError:
        return None
    for path in sorted(paths):
        try:
            ctypes.CDLL(path, ctypes.RTLD_GLOBAL)
        except OSError:
            continue
        return path
    return None


def _compile(compiler: str, file: Path, threads: bool) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        compiled, linked = Path(folder) / "native.o", Path(folder) / "native.so"
        openmp = ("-fopenmp",) if threads else ("-fopenmp-simd",)
        for arguments in (
            (*COMPILE, *openmp, str(SOURCE), "-o", str(compiled)),
            (*LINK, str(compiled), "-o", str(linked), "-lm"),
        ):
            result = subprocess.run([compiler, *arguments], capture_output=True, text=True)
            if result.returncode:
                reason = next((line for line in result.stderr.splitlines() if "error" in line), result.stderr[:200])
                raise NoCompiler(f"{compiler} failed: {reason.strip()}")
        digest = _digest(linked)
        os.replace(linked, file)
        file.with_suffix(".sha256").write_text(digest)


def _is_whole(file: Path) -> bool:
    """Whether what was compiled is still that: opening a library that was cut off ends the process."""
    try:
        return file.with_suffix(".sha256").read_text() == _digest(file)
    except OSError:
        return False


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
