"""Compiles a C++ file with the system's compiler on first use, in a few seconds, and keeps the library in a cache."""

import contextlib
import contextvars
import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from linformer_cli.errors import LintxError
from linformer_cli.files import user_cache
from linformer_cli.system.environment import processor_features, processor_name

# What every source may include.
HEADERS = Path(__file__).parent
# Fast math lets exponentials and sums be vectorised; it is left out when linking, where it would change how the whole
# process treats the smallest numbers.
COMPILE = ("-std=c++17", "-O3", "-march=native", "-ffast-math", "-fPIC", "-c")
LINK = ("-shared",)

_allowed = contextvars.ContextVar("allowed", default=True)


class NoCompiler(LintxError):
    """Compiled code cannot be had here; the message says why."""


def cache_folder() -> Path:
    """Where compiled libraries are kept; raises `NoCompiler` where there is no such place."""
    try:
        return user_cache() / "native"
    except LintxError as error:
        raise NoCompiler(str(error)) from None


@contextlib.contextmanager
def textbook_only() -> Iterator[None]:
    """Inside it, what has a compiled form and a textbook one in plain torch computes by the textbook."""
    token = _allowed.set(False)
    try:
        yield
    finally:
        _allowed.reset(token)


def compiled_allowed() -> bool:
    """Whether compiled forms may be used here: not inside `textbook_only`."""
    return _allowed.get()


def has_library(source: Path) -> bool:
    """Whether the library of `source` may be used here and can be had."""
    return compiled_allowed() and not isinstance(_outcome(source), NoCompiler)


@functools.cache
def _outcome(source: Path) -> ctypes.CDLL | NoCompiler:
    try:
        return _load(source)
    except NoCompiler as error:
        return error  # kept too: no second try in this process


def load_library(source: Path) -> ctypes.CDLL:
    """The compiled functions of `source`; raises `NoCompiler` where there is no compiler or it fails."""
    outcome = _outcome(source)
    if isinstance(outcome, NoCompiler):
        raise NoCompiler(str(outcome))  # a new one: an error that is raised again and again keeps every frame it passed
    return outcome


def load_function(source: Path, name: str, *arguments: Any) -> Callable[..., None]:
    """A function of `source` that returns nothing, with the types of its arguments; raises as `load_library`."""
    function = getattr(load_library(source), name)
    function.argtypes, function.restype = arguments, None
    return function  # type: ignore[no-any-return]


def describe_library(source: Path) -> str:
    """Where the library is, or why there is none."""
    try:
        return f"compiled, in {load_library(source)._name}"
    except NoCompiler as error:
        return f"not to be had: {error}"


def _load(source: Path) -> ctypes.CDLL:
    compiler = next((found for name in ("c++", "g++", "clang++") if (found := shutil.which(name))), None)
    if compiler is None:
        raise NoCompiler("there is no C++ compiler (c++, g++ or clang++) on the PATH")
    threads = _threads_library()
    texts = [file.read_bytes() for file in (source, *sorted(HEADERS.glob("*.h")))]
    processor = (platform.machine(), processor_name(), processor_features())
    key = (texts, os.path.realpath(compiler), COMPILE, processor, str(threads))
    file = cache_folder() / f"{hashlib.sha256(repr(key).encode()).hexdigest()[:20]}.so"
    try:
        if not _is_whole(file):
            _compile(compiler, source, file, threads is not None)
        return ctypes.CDLL(str(file))
    except OSError as error:
        raise NoCompiler(f"the kernels cannot be compiled or loaded: {error.strerror or error}") from None


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


def _compile(compiler: str, source: Path, file: Path, threads: bool) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        compiled, linked = Path(folder) / "compiled.o", Path(folder) / "linked.so"
        openmp = ("-fopenmp",) if threads else ("-fopenmp-simd",)
        for arguments in (
            (*COMPILE, *openmp, "-I", str(HEADERS), str(source), "-o", str(compiled)),
            (*LINK, str(compiled), "-o", str(linked), "-lm"),
        ):
            # In a session of its own: a Ctrl-C that only asks a run to end would end the compiler at once.
            result = subprocess.run([compiler, *arguments], capture_output=True, text=True, start_new_session=True)
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
