"""Finds the pictures and files to compress, and refuses those that would not come back as they are."""

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from linformer_cli.data.pictures import list_endings
from linformer_cli.errors import DataError, UsageError
from linformer_cli.files import STREAM, is_special
from .items import Contents, Item, Tiling, check_clashes, check_name, check_names
from .sources import ByteSource, PictureSource, describe_picture

_STDIN_NAME = "stdin"  # the name of what comes from stdin


@dataclass(frozen=True)
class Input:
    """A file to compress, or the data of stdin, and its name in the compressed file."""

    name: str
    file: Path | BinaryIO


def list_inputs(paths: Sequence[str], stdin: Callable[[], BinaryIO], is_bytes: bool) -> list[Input]:
    """List the files named by `paths`; a folder stands for its files that are not hidden, `-` for stdin.

    Raises `DataError` for a path that does not exist, and `UsageError` without files or for two of the same name.
    """
    found: list[Input] = []
    for text in paths:
        path = Path(text)
        if text == STREAM:
            found.append(Input(_STDIN_NAME, stdin()))
        elif path.is_dir():
            found += [Input(name, path / name) for name in _list_folder(path, is_bytes)]
        elif not path.exists():
            raise DataError(f"'{text}' does not exist")
        else:
            found.append(Input(path.name, path))
    if not found:
        raise UsageError(f"found no {'files' if is_bytes else 'pictures'} in {', '.join(paths)}")
    for one in found:
        with _suggesting("rename it"):
            check_name(one.name)
    with _suggesting("compress them into several files, or pass the folder that contains them"):
        check_clashes([one.name for one in found])
    return found


@contextlib.contextmanager
def _suggesting(remedy: str) -> Iterator[None]:
    try:
        yield
    except DataError as error:
        raise UsageError(f"{error}; {remedy}") from None


def open_files(inputs: Sequence[Input], tiling: Tiling, label: int | None) -> ByteSource:
    """Return the source of any files. Raises `DataError` if a file cannot be read."""
    items = [Item(one.name, 1, _measure(one), 1) for one in inputs]
    return ByteSource(Contents(tiling, items), [one.file for one in inputs], label)


def open_pictures(
    inputs: Sequence[Input], tiling: Tiling, tile: bool, label: int | None, warn: Callable[[str], None]
) -> PictureSource:
    """Open pictures of the model's size, or of any with `tile`. Raises `DataError` after all `warn`ings."""
    shape = tiling.shape
    files = [one.file if isinstance(one.file, Path) else one.file.read() for one in inputs]
    items: list[Item] = []
    faults: list[str] = []
    for one, file in zip(inputs, files, strict=True):
        try:
            item = describe_picture(file, one.name, shape)
        except DataError as error:
            faults.append(str(error))
            continue
        if tile or (item.height, item.width, tiling.count_values(item)) == (shape.height, shape.width, shape.positions):
            items.append(item)
        else:
            kinds = {1: "grey", 2: "grey with alpha", 3: "RGB", 4: "RGB with alpha"}
            own, wanted = ("", "") if shape.palette else (f" {kinds[n]}" for n in (item.bands, shape.channels))
            found = f"{item.width} x {item.height}{own}"
            faults.append(f"'{one.name}' is {found}, not {shape.width} x {shape.height}{wanted}")
    if len(faults) == 1 == len(inputs):
        raise DataError(faults[0])
    for fault in faults:
        warn(fault)
    if faults:
        hint = "" if tile else "; --tile cuts pictures of other sizes into tiles"
        raise DataError(f"{len(faults):,} of {len(inputs):,} pictures cannot be compressed; nothing is written{hint}")
    # A picture of any format comes back as a PNG.
    paths = [PurePosixPath(item.name) for item in items]
    names = [(path if path.suffix.lower() == ".png" else path.with_suffix(".png")).as_posix() for path in paths]
    try:
        check_names(names)
    except DataError as error:
        raise UsageError(f"as PNGs, {error}") from None
    named = [replace(item, name=name) for name, item in zip(names, items, strict=True)]
    contents = Contents(tiling, (), len(named))
    # Names take bytes, but numbers do not.
    if any(item != contents.item(index) for index, item in enumerate(named)):
        contents = Contents(tiling, named)
    return PictureSource(contents, files, label)


def _list_folder(folder: Path, is_bytes: bool) -> list[str]:
    """Return the names of the files below `folder`, sorted, relative to it. Links to folders are not followed."""
    endings = list_endings()

    def fail(error: OSError) -> None:
        raise DataError(f"cannot read the folder {error.filename} ({error.strerror or error})")

    found = []
    for place, folders, names in os.walk(folder, onerror=fail):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            path = Path(place, name)
            wanted = is_bytes or path.suffix.lower() in endings
            if not name.startswith(".") and wanted and not is_special(path):
                found.append(path.relative_to(folder).as_posix())
    return sorted(found)


def _measure(one: Input) -> int:
    if not isinstance(one.file, Path):
        return one.file.seek(0, os.SEEK_END)
    try:
        if is_special(one.file):
            raise DataError(f"'{one.file}' is a pipe or a device; pass its data to '-'")
        with open(one.file, "rb") as opened:
            return os.fstat(opened.fileno()).st_size
    except OSError as error:
        raise DataError(f"cannot read {one.file} ({error.strerror or error})") from None
