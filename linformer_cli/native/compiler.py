"""Compiles a C++ file with the system's compiler on first use and keeps the library in a cache."""

import contextlib
import contextvars
import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from linformer_cli.errors import LintxError
from linformer_cli.system.environment import processor_features, processor_name

from .cache import UnsafeCache, describe_risk, open_cache, require_private
from .constants import definitions

# The headers that every source may include.
HEADERS = Path(__file__).parent
# Fast math is not used, because it may drop NaN. maths.h has functions that are vectorised without it.
COMPILE = ("-std=c++17", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-c", *definitions())
LINK = ("-shared", "-pthread")
# Compiling takes a few seconds. A compiler that exceeds this limit counts as hanging.
COMPILE_SECONDS = 120.0

_allowed = contextvars.ContextVar("allowed", default=True)


class NoCompiler(LintxError):
    """Compiled code is not available here; the message says why."""


@contextlib.contextmanager
def textbook_only() -> Iterator[None]:
    """A context in which only plain torch forms are used, never compiled forms."""
    token = _allowed.set(False)
    try:
        yield
    finally:
        _allowed.reset(token)


def compiled_allowed() -> bool:
    """Whether compiled forms may be used here: false inside `textbook_only`."""
    return _allowed.get()


def has_library(source: Path) -> bool:
    """Whether the library of `source` may be used here and is available."""
    return compiled_allowed() and not isinstance(try_load(source, ()), NoCompiler)


@functools.cache
def try_load(source: Path, options: tuple[str, ...]) -> ctypes.CDLL | NoCompiler:
    """Return the library of `source` compiled with `options`, or the reason why there is none.

    Each combination of `source` and `options` is a separate library, and is tried only once per process.
    """
    try:
        return _load(source, options)
    except NoCompiler as error:
        return error


def load_library(source: Path, options: tuple[str, ...] = ()) -> ctypes.CDLL:
    """Return the functions of `source`, compiled with `options`. Raises `NoCompiler` without a working compiler."""
    outcome = try_load(source, options)
    if isinstance(outcome, NoCompiler):
        # Raise a new error, because an error that is raised again keeps every frame it has passed through in memory.
        raise NoCompiler(str(outcome))
    return outcome


def load_function(source: Path, name: str, *arguments: Any) -> Callable[..., None]:
    """Return the function `name` of `source`, which returns nothing. Raises what `load_library` raises."""
    function = getattr(load_library(source), name)
    function.argtypes, function.restype = arguments, None
    return function  # type: ignore[no-any-return]


def describe_library(source: Path) -> str:
    """Where the library of `source` is, or why there is none."""
    try:
        return f"compiled, in {load_library(source)._name}"
    except NoCompiler as error:
        return f"not available: {error}"


@functools.cache
def _warn(message: str) -> None:
    """Log a warning once per process. Unless logging is configured otherwise, the warning is one line on stderr."""
    logging.getLogger(__name__).warning(message)


def _load(source: Path, options: tuple[str, ...]) -> ctypes.CDLL:
    compiler = next((found for name in ("c++", "g++", "clang++") if (found := shutil.which(name))), None)
    if compiler is None:
        raise NoCompiler("there is no C++ compiler (c++, g++ or clang++) on the PATH")
    texts = [file.read_bytes() for file in (source, *sorted(HEADERS.rglob("*.h")))]
    processor = (platform.machine(), processor_name(), processor_features())
    options = (*COMPILE, *options)
    key = (texts, os.path.realpath(compiler), options, processor)
    name = f"{hashlib.sha256(repr(key).encode()).hexdigest()[:20]}.so"
    try:
        try:
            return _load_file(compiler, source, open_cache() / name, options)
        except UnsafeCache as risk:
            with tempfile.TemporaryDirectory(prefix="lintx-") as folder:  # readable and writable by its owner only
                place = Path(os.path.realpath(folder))
                require_private(place)
                library = _load_file(compiler, source, place / name, options)
            _warn(f"warning: kernels are compiled for this process only, not kept in the cache: {risk}")
            return library
    except NoCompiler:
        raise
    except LintxError as error:
        raise NoCompiler(str(error)) from None
    except OSError as error:
        raise NoCompiler(f"the kernels cannot be compiled or loaded: {error.strerror or error}") from None


def _load_file(compiler: str, source: Path, file: Path, options: tuple[str, ...]) -> ctypes.CDLL:
    if not _is_whole(file):
        _compile(compiler, source, file, options)
    return ctypes.CDLL(str(file))


def _compile(compiler: str, source: Path, file: Path, options: tuple[str, ...]) -> None:
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        compiled, linked, digest = (Path(folder) / name for name in ("compiled.o", "linked.so", "digest"))
        _run(compiler, *options, "-I", str(HEADERS), str(source), "-o", str(compiled))
        _run(compiler, *LINK, str(compiled), "-o", str(linked), "-lm")
        digest.write_bytes(_digest(linked))
        for made, target, mode in ((linked, file, 0o755), (digest, _digest_file(file), 0o644)):
            made.chmod(mode)  # regardless of the umask
            os.replace(made, target)


def _run(compiler: str, *arguments: str) -> None:
    """Run the compiler; raises `NoCompiler` if it fails or hangs."""
    if compiler in _hanging:
        raise NoCompiler(_hanging[compiler])
    # Ctrl-C asks a run to stop, but must not end the compiler. The compiler therefore gets its own session.
    process = subprocess.Popen(
        [compiler, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        _, errors = process.communicate(timeout=COMPILE_SECONDS)
    except subprocess.TimeoutExpired:
        _end(process)
        # Remember the failure, because compiling the next file would hang just as long.
        _hanging[compiler] = f"{compiler} did not finish within {COMPILE_SECONDS:.0f} s"
        _warn(f"warning: {_hanging[compiler]}; plain torch is used instead of compiled kernels")
        raise NoCompiler(_hanging[compiler]) from None
    except BaseException:
        _end(process)
        raise
    if process.returncode:
        reason = next((line for line in errors.splitlines() if "error" in line), errors[:200])
        raise NoCompiler(f"{compiler} failed: {reason.strip()}")


# Messages about the compilers that did not finish in this process, by compiler.
_hanging: dict[str, str] = {}


def _end(process: "subprocess.Popen[str]") -> None:
    """End the compiler and the programs that it started."""
    if hasattr(os, "killpg"):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()
    process.communicate()


def _is_whole(file: Path) -> bool:
    """Whether `file` is an undamaged library that this user compiled.

    The check comes before opening the library, because opening a truncated library ends the process.
    """
    try:
        for part in (file, _digest_file(file)):
            if (risk := describe_risk(part)) is not None:
                _warn(f"warning: compiled kernels in the cache are replaced: {risk}")
                return False
        return _digest_file(file).read_bytes() == _digest(file)
    except OSError:
        return False


def _digest_file(file: Path) -> Path:
    return file.with_suffix(".sha256")


def _digest(file: Path) -> bytes:
    return hashlib.sha256(file.read_bytes()).hexdigest().encode()
