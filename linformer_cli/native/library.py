"""Loads the compiled C++ that suits this processor. Installing the package builds the libraries (build.py)."""

import contextlib
import contextvars
import ctypes
import functools
import logging
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from linformer_cli.errors import LintxError, UsageError, unknown_name
from .build import COMMAND, PACKAGE, InstructionSet, is_fresh, library_file, this_machine

VARIABLE = "LINTX_INSTRUCTIONS"  # the environment variable that names the instruction set to use

# The types of numbers in structures.
_NUMBERS: dict[str, type] = {"int64_t": ctypes.c_int64, "uint64_t": ctypes.c_uint64, "double": ctypes.c_double}

_allowed = contextvars.ContextVar("allowed", default=True)


class NoLibrary(LintxError):
    """There is no compiled code here; the message says why."""


@dataclass(frozen=True)
class Library:
    functions: ctypes.CDLL
    instruction_set: InstructionSet
    reason: str


@contextlib.contextmanager
def reference_only() -> Iterator[None]:
    """Return a context in which only plain torch forms are used, never compiled forms."""
    token = _allowed.set(False)
    try:
        yield
    finally:
        _allowed.reset(token)


def compiled_allowed() -> bool:
    """Return whether compiled forms may be used here: false inside `reference_only`."""
    return _allowed.get()


def has_library() -> bool:
    """Return whether compiled code may be used and is available. Where it is missing, log one warning per process."""
    if not compiled_allowed():
        return False
    outcome = try_library()
    if isinstance(outcome, NoLibrary):
        _warn(f"warning: training and sampling use plain torch, which is slower: {outcome}")
    return not isinstance(outcome, NoLibrary)


def load_library() -> ctypes.CDLL:
    """Return the compiled functions. Raises `NoLibrary`, and what `has_library` raises."""
    outcome = try_library()
    if isinstance(outcome, NoLibrary):
        # Raise a new error, because an error that is raised again keeps every frame it has passed through in memory.
        raise NoLibrary(str(outcome))
    return outcome.functions


def load_function(name: str, *arguments: Any) -> Callable[..., None]:
    """Return the compiled function `name`, which returns nothing. Raises what `load_library` raises."""
    function = getattr(load_library(), name)
    function.argtypes, function.restype = arguments, None
    return function


@functools.cache
def read_structure(file: str, name: str) -> type[ctypes.Structure]:
    """Read the structure `name` of a C++ file: numbers of 8 bytes, pointers and `View`s of scan.h, without padding."""
    text = re.sub(r"//.*", "", (PACKAGE / file).read_text(encoding="utf-8"))
    (body,) = re.findall(rf"^struct {name} {{\n(.*?)^}};", text, re.MULTILINE | re.DOTALL)
    fields: list[tuple[str, type]] = []
    for declaration in body.split(";")[:-1]:
        kind, names = declaration.replace("const ", "").replace("*", " *").split(maxsplit=1)
        for field in names.split(","):
            if "*" in field:
                fields.append((field.strip(" *\n"), ctypes.c_void_p))
            else:
                fields.append((field.strip(), _NUMBERS.get(kind) or read_structure("native/scan.h", kind)))
    # Without a dictionary of its own, a structure refuses names that are not fields.
    return type(name, (ctypes.Structure,), {"_fields_": fields, "__slots__": ()})


def describe_library() -> str:
    """Return which library is used and why, or why there is none. Raises what `has_library` raises."""
    outcome = try_library()
    if isinstance(outcome, NoLibrary):
        return f"not available: {outcome}"
    chosen = outcome.instruction_set
    return f"{chosen.name} ({chosen.meaning}), {outcome.reason}, in {outcome.functions._name}"


def try_library() -> Library | NoLibrary:
    """Return what `choose_library` chooses, or the reason why there is no library. Each is tried once per process."""
    return _try(os.environ.get(VARIABLE, ""))


@functools.cache
def _try(wanted: str) -> Library | NoLibrary:
    try:
        return choose_library(wanted)
    except NoLibrary as error:
        return error


def supported_sets() -> tuple[InstructionSet, ...]:
    """Return the processor's instruction sets, slowest first, as its simplest library tells. Raises `NoLibrary`."""
    every = this_machine().instruction_sets
    supports = _open(every[0]).lintx_supports
    supports.restype = ctypes.c_int64
    return tuple(one for one in every if supports(one.name.encode()))


def choose_library(wanted: str = "") -> Library:
    """Load the library for the instructions `wanted`, or the fastest. Raises `NoLibrary`, or as `has_library` does."""
    supported = supported_sets()
    if wanted:
        chosen, reason = _find_wanted(wanted, supported), f"requested by {VARIABLE}"
    else:
        every = this_machine().instruction_sets
        chosen = next(one for one in reversed(supported) if library_file(this_machine(), one).exists())
        better = every[every.index(chosen) + 1 :][:1]
        lacks = "no library for" if better and better[0] in supported else "this processor does not support"
        reason = f"{lacks} {better[0].name}" if better else "the fastest"
    return Library(_open(chosen), chosen, reason)


def _find_wanted(name: str, supported: tuple[InstructionSet, ...]) -> InstructionSet:
    every = {one.name: one for one in this_machine().instruction_sets}
    if name not in every:
        raise unknown_name(f"instruction set in {VARIABLE}", name, every)
    if every[name] not in supported:
        names = ", ".join(one.name for one in supported)
        raise UsageError(f"{VARIABLE}={name}: this processor lacks {every[name].meaning}; it supports {names}")
    return every[name]


def _open(instruction_set: InstructionSet) -> ctypes.CDLL:
    file = library_file(this_machine(), instruction_set)
    if not file.exists():
        raise NoLibrary(f"there is no compiled library {file.name}; '{COMMAND}' builds it with a C++ compiler")
    if not is_fresh(file, instruction_set):
        raise NoLibrary(f"the C++ differs from what {file.name} was built from; '{COMMAND}' builds it again")
    try:
        return ctypes.CDLL(str(file))
    except OSError as error:
        raise NoLibrary(f"the compiled library cannot be loaded: {error}") from None


@functools.cache
def _warn(message: str) -> None:
    """Log a warning once per process. Unless logging is configured otherwise, the warning is one line on stderr."""
    logging.getLogger(__name__).warning(message)
