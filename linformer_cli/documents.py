"""Reads bytes, JSON and TOML from untrusted files, with limits on size and depth, and checks them against a type."""

import json
import os
import stat
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidatorFunctionWrapHandler, field_validator

from .errors import UsageError, shorten, unknown_name

# These limits are far above any document that lintx writes.
LARGEST_DOCUMENT = 2**20
DEEPEST = 32
# tomllib takes quadratic time for a key of many parts, and a key is on one line.
_MOST_DOTS = 200
_UTF8 = "utf-8-sig"  # some editors on Windows begin a file with a byte order mark
_SCALARS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


class Config(BaseModel):
    """Base of all configurations: immutable and strict. An integer is a float, and text is read if `parses_text`."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
    # Whether values may be given as text, as on a command line.
    parses_text: ClassVar[bool] = False

    @field_validator("*", mode="wrap")
    @classmethod
    def _keep_type(cls, value: Any, parse: ValidatorFunctionWrapHandler) -> Any:
        parsed = parse(value)
        given, wanted = type(value), type(parsed)
        kept = given is wanted or (given, wanted) == (int, float) or (given is str and cls.parses_text)
        if given in _SCALARS and wanted in _SCALARS and not kept:
            raise ValueError(f"must be {_SCALARS.get(wanted, wanted.__name__)}")
        return parsed

    def check(self) -> None:
        """Raise `ValueError` if values contradict each other. Every new configuration is checked."""

    def model_post_init(self, context: Any) -> None:
        self.check()


def setting(default: Any, description: str, **bounds: Any) -> Any:
    """Declare a field of a configuration, with its text in help pages. `bounds` are pydantic's, such as `gt`."""
    return Field(default, description=description, **bounds)


ConfigType = TypeVar("ConfigType", bound=Config)


def read_bytes(file: Path, most: int = LARGEST_DOCUMENT) -> bytes:
    """Read a file. Raises `ValueError` for more than `most` bytes and for a pipe, which is not waited for."""
    # Without O_NONBLOCK, opening a pipe would wait for a writer.
    with open(file, "rb", opener=lambda path, flags: os.open(path, flags | getattr(os, "O_NONBLOCK", 0))) as opened:
        status = os.fstat(opened.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("it is a pipe or a device, not a file")
        if status.st_size > most:
            raise ValueError(f"it has {status.st_size:,} bytes, and at most {most:,} are read")
        return opened.read(status.st_size)


def read_json(file: Path) -> Any:
    """Return the JSON document in a file. Raises what `read_bytes` and `parse_json` raise."""
    return parse_json(read_bytes(file))


def parse_json(data: str | bytes, any_text: bool = False) -> Any:
    """Return the JSON document in a text.

    Raises `ValueError` if it is not JSON, is nested more than `DEEPEST` levels deep, or, unless `any_text`, has lone
    surrogates, which Python puts into paths that are not UTF-8, and which cannot be written.
    """
    text = data if isinstance(data, str) else data.decode(_UTF8)
    try:
        document = json.loads(text)
    except RecursionError:
        raise _too_deep() from None
    _check(document, any_text)
    return document


def read_toml(file: Path) -> dict[str, Any]:
    """Return the TOML document in a file. Raises what `read_bytes` raises, and `ValueError` as `parse_json` does."""
    text = read_bytes(file).decode(_UTF8)
    if any(line.count(".") > _MOST_DOTS for line in text.splitlines()):
        raise _too_deep()
    try:
        document = tomllib.loads(text)
    except RecursionError:
        raise _too_deep() from None
    _check(document)
    return document


def _check(value: Any, any_text: bool = False, depth: int = 0) -> None:
    if depth > DEEPEST:
        raise _too_deep()
    if isinstance(value, dict):
        for pair in value.items():
            for part in pair:
                _check(part, any_text, depth + 1)
    elif isinstance(value, list):
        for part in value:
            _check(part, any_text, depth + 1)
    elif isinstance(value, str) and not any_text:
        value.encode()  # raises a ValueError for lone surrogates


def _too_deep() -> ValueError:
    return ValueError(f"it is nested more than {DEEPEST} levels deep")


def parse_config(kind: type[ConfigType], values: Mapping[str, Any], where: str) -> ConfigType:
    """Build `kind` from plain values. For the first fault, raises a `UsageError` that names `where` and the key."""
    try:
        return kind.model_validate(dict(values))
    except ValidationError as error:
        raise describe_validation_error(kind, error, where) from None


def describe_validation_error(kind: type[BaseModel], error: ValidationError, where: str) -> UsageError:
    """Describe the first fault of a pydantic error in one line, with a suggestion for an unknown key."""
    faults = error.errors()
    # If a key is misspelt, pydantic also reports it as missing. The misspelling is the better message.
    first = next((fault for fault in faults if fault["type"] == "extra_forbidden"), faults[0])
    path = shorten(".".join(str(part) for part in first["loc"]))
    if first["type"] == "extra_forbidden":
        *parents, name = [str(part) for part in first["loc"]]
        fault = unknown_name("key", name, _fields_at(kind, parents))
        return UsageError(f"{'.'.join([where, *parents])}: {fault}")
    message = first["msg"].removeprefix("Value error, ")
    # A message about a whole table already names the values that conflict.
    found = "" if isinstance(first["input"], dict) else f", found {shorten(repr(first['input']))}"
    return UsageError(f"{where}: {f'{path}: ' if path else ''}{message}{found}")


def _fields_at(kind: type[BaseModel], parents: list[str]) -> list[str]:
    for parent in parents:
        if parent.isdigit():  # the number of a table in a list
            continue
        annotation = kind.model_fields[parent].annotation
        # A table may be optional, or one of a list of tables.
        kinds = [one for one in (annotation, *get_args(annotation)) if isinstance(one, type)]
        tables = [one for one in kinds if issubclass(one, BaseModel)]
        if not tables:
            return []
        kind = tables[0]
    return list(kind.model_fields)
