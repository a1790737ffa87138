"""Reads bytes, JSON and TOML from untrusted files, with limits on size and depth."""

import json
import os
import stat
import tomllib
from pathlib import Path
from typing import Any

# These limits are far above any document that lintx writes.
LARGEST_DOCUMENT = 2**20
DEEPEST = 32
# tomllib takes quadratic time for a key of many parts, and a key is on one line.
_MOST_DOTS = 200


def read_bytes(file: Path, most: int = LARGEST_DOCUMENT) -> bytes:
    """The contents of a file. Never waits for a pipe, and never reads more than `most` bytes.

    Raises `OSError` if the system refuses, as for a folder, and `ValueError` for a pipe, a device or a larger file.
    """
    with open(file, "rb", opener=_open_at_once) as opened:
        status = os.fstat(opened.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("it is a pipe or a device, not a file")
        if status.st_size > most:
            raise ValueError(f"it has {status.st_size:,} bytes, and at most {most:,} are read")
        return opened.read(status.st_size)


def _open_at_once(path: str, flags: int) -> int:
    # Without O_NONBLOCK, opening a pipe would wait for a writer.
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def read_json(file: Path) -> Any:
    """The JSON document in a file. Raises what `read_bytes` and `parse_json` raise."""
    return parse_json(read_bytes(file))


def parse_json(data: str | bytes, any_text: bool = False) -> Any:
    """The JSON document in a text.

    Raises `ValueError` if the text is not JSON, if it is nested more than `DEEPEST` levels deep, or if a text in it has
    lone surrogates, which cannot be written in UTF-8. With `any_text`, surrogates are allowed, because Python puts them
    into paths that are not UTF-8.
    """
    text = data if isinstance(data, str) else data.decode()
    try:
        document = json.loads(text)
    except RecursionError:
        raise _too_deep() from None
    _check(document, any_text)
    return document


def read_toml(file: Path) -> dict[str, Any]:
    """The TOML document in a file. Raises what `read_bytes` raises, and `ValueError` as `parse_json` does."""
    text = read_bytes(file).decode()
    if any(line.count(".") > _MOST_DOTS for line in text.splitlines()):
        raise _too_deep()
    try:
        document = tomllib.loads(text)
    except RecursionError:
        raise _too_deep() from None
    _check(document)
    return document


def _check(document: Any, any_text: bool = False) -> None:
    waiting = [(document, 0)]
    while waiting:
        value, depth = waiting.pop()
        if depth > DEEPEST:
            raise _too_deep()
        if isinstance(value, dict):
            waiting += [(part, depth + 1) for pair in value.items() for part in pair]
        elif isinstance(value, list):
            waiting += [(part, depth + 1) for part in value]
        elif isinstance(value, str) and not any_text:
            value.encode()  # raises a ValueError for lone surrogates


def _too_deep() -> ValueError:
    return ValueError(f"it is nested more than {DEEPEST} levels deep")
