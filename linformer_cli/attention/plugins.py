"""Mechanisms from outside the package: files that are named with `--plugin`, and packages that announce theirs."""

import functools
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from importlib.metadata import entry_points
from pathlib import Path

from linformer_cli.errors import UsageError, shorten, unknown_name
from .base import Attention

# The files of `--plugin`, separated like the folders of PATH. Processes that a command starts inherit them.
VARIABLE = "LINTX_PLUGIN"
# The entry points of packages. Each names a class.
GROUP = "lintx.mechanisms"
# What tables and models need to know about a class, beside its methods.
_FACTS = ("name", "source", "family", "method", "memory", "options_type")

Mechanism = type[Attention]


def read_files() -> list[Mechanism]:
    """Read the mechanisms in the environment's files. Raises `UsageError` if one has none or cannot be run."""
    files = filter(None, os.environ.get(VARIABLE, "").split(os.pathsep))
    return [mechanism for file in files for mechanism in read_file(file)]


@functools.cache
def read_file(file: str) -> tuple[Mechanism, ...]:
    """Run a Python file and return the mechanisms that it defines. Raises what `read_files` raises."""
    name = f"lintx_plugin_{Path(file).stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise UsageError(f"a plugin is a Python file, such as mine.py, found '{file}'")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # whatever the code of somebody else raises
        hint = "; install it as a package, whose entry point names the class" if isinstance(error, ImportError) else ""
        place = find_line(error, file) or f"'{file}'"
        raise UsageError(f"{place}: {type(error).__name__}: {shorten(str(error))}{hint}") from error
    types = dict.fromkeys(one for one in vars(module).values() if isinstance(one, type))
    found = [one for one in types if issubclass(one, Attention) and not one.__module__.startswith("linformer_cli.")]
    if not found:
        raise UsageError(f"'{file}' defines no mechanism: a class derived from linformer_cli.attention.base.Attention")
    complete = [one for one in found if not inspect.isabstract(one)]
    return tuple(check_class(one, file) for one in complete or found)


def find_line(error: Exception, file: str) -> str:
    """Find the last line that raised `error` in files of the folder of `file`, such as "'mine.py', line 3", or ""."""
    frames, folder = traceback.extract_tb(error.__traceback__), os.path.dirname(file)
    own = [frame for frame in frames if os.path.dirname(frame.filename) == folder]
    return f"'{own[-1].filename}', line {own[-1].lineno}" if own else ""


def read_class(text: str) -> Mechanism:
    """Read the class in `mine:MyAttention` or `path/mine.py:MyAttention`, of an importable module or a file."""
    place, _, name = text.rpartition(":")
    file = Path(place if place.endswith(".py") else f"{place}.py")
    try:
        found = {one.__name__: one for one in read_file(os.path.abspath(file))} if file.exists() else None
        known = vars(importlib.import_module(place)) if found is None else found
    except (ImportError, ValueError) as error:
        raise UsageError(f"'{text}': {shorten(str(error))}; write FILE.py:CLASS or MODULE:CLASS") from error
    if name not in known:
        raise unknown_name(f"mechanism of '{place}'", name, found or ())
    return check_class(known[name], text)


@functools.cache
def read_packages() -> tuple[Mechanism, ...]:
    """Return the mechanisms that installed packages announce. Raises `UsageError` for one that cannot be loaded."""
    found = []
    for point in entry_points(group=GROUP):
        try:
            found.append(check_class(point.load(), point.value))
        except (ImportError, AttributeError) as error:
            raise UsageError(f"mechanism '{point.name}' of an installed package: {shorten(str(error))}") from error
    return tuple(found)


def check_class(found: object, origin: str) -> Mechanism:
    """Return `found` if it is a complete mechanism, or else raise `UsageError`."""
    if not isinstance(found, type) or not issubclass(found, Attention):
        raise UsageError(f"'{origin}' is no mechanism: a class derived from linformer_cli.attention.base.Attention")
    missing = [fact for fact in _FACTS if not hasattr(found, fact)] + sorted(found.__abstractmethods__)
    if missing:
        raise UsageError(f"'{origin}': {found.__name__} does not define {', '.join(missing)}")
    return found
