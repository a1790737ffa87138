"""Windows of bytes, cut from a memory-mapped file or from the files of a folder."""

import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from linformer_cli.errors import DataError
from linformer_cli.files import is_special
from . import Split
from .arrays import MappedArray

DEFAULT_LENGTH = 1024
# One stretch in 20 is for validation, and one for testing, whatever the length of the windows.
LONGEST_STRETCH, _PERIOD = 65_536, 20
_HELD_OUT: dict[int, Split] = {_PERIOD // 2 - 1: "validation", _PERIOD - 1: "test"}
_MOST_MAPS = 100  # a process may have only about 1,000 files open


@dataclass(frozen=True)
class JoinedFiles:
    """Files that are read as one sequence of bytes. `ends` int64 [files] holds the number of bytes up to each end."""

    paths: Sequence[Path]
    ends: NDArray[np.int64]
    skipped: tuple[str, ...] = ()

    @property
    def count(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def read(self, start: int, length: int) -> NDArray[np.uint8]:
        """Return bytes `start` to `start + length - 1`, uint8 [length]. Raises `DataError` if a file has changed."""
        parts, end = [], start + length
        file = int(np.searchsorted(self.ends, start, side="right"))
        while start < end:
            begin = int(self.ends[file - 1]) if file else 0
            stop = min(end, int(self.ends[file]))
            part = _map_file(self.paths[file])[start - begin : stop - begin]
            if len(part) != stop - start:
                raise DataError(f"{self.paths[file]} became shorter; start again with files that do not change")
            parts.append(part)
            start, file = stop, file + 1
        return np.concatenate(parts)


@functools.lru_cache(_MOST_MAPS)
def _map_file(path: Path) -> NDArray[np.uint8]:
    try:
        return MappedArray(path, dtype=np.uint8, mode="r")
    except (OSError, ValueError) as error:  # numpy raises ValueError for an empty file
        raise DataError(f"cannot read {path} ({getattr(error, 'strerror', None) or error})") from None


@dataclass(frozen=True, eq=False)
class ByteWindows:
    """Windows of `length` bytes from `starts` int64 [N], which are indexed like images uint8 [N, 1, length, 1]."""

    files: JoinedFiles
    starts: NDArray[np.int64]
    length: int

    @property
    def shape(self) -> tuple[int, ...]:
        return len(self.starts), 1, self.length, 1

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: slice | NDArray[np.int64]) -> NDArray[np.uint8]:
        found = np.empty((len(self.starts[index]), 1, self.length, 1), np.uint8)
        for window, start in zip(found, self.starts[index], strict=True):
            window[0, :, 0] = self.files.read(int(start), self.length)
        return found


def load_byte_windows(path: Path, splits: Sequence[Split], length: int) -> tuple[list[ByteWindows], tuple[str, ...]]:
    """Load the adjacent windows of each of `splits`, and messages about files that cannot be read.

    `path` is a file, or a folder whose files, but hidden ones, are joined. Raises `DataError` for too few bytes.
    """
    files = _open_files(path)
    stretches = divide_bytes(files.count)
    found = []
    for split in splits:
        starts = [np.arange(part.start, part.stop - length + 1, length) for part in stretches[split]]
        windows = ByteWindows(files, np.concatenate([*starts, np.empty(0, np.int64)]).astype(np.int64), length)
        if not len(windows):
            most = max((len(part) for part in stretches[split]), default=0)
            less = f"has {most:,}, less than a window of {length:,}; give more bytes or a smaller --length"
            raise DataError(f"{path} has {files.count:,} bytes, so the longest stretch for '{split}' {less}")
        found.append(windows)
    return found, files.skipped


def divide_bytes(count: int) -> dict[Split, list[range]]:
    """Return the stretches of each split among `count` bytes. Adjacent stretches of a split are joined.

    A stretch has `LONGEST_STRETCH` bytes, or a twentieth of `count` if that is less; the rest is left out.
    """
    stretches: dict[Split, list[range]] = {"train": [], "validation": [], "test": []}
    size = max(1, min(LONGEST_STRETCH, count // _PERIOD))
    for number in range(count // size):
        parts = stretches[_HELD_OUT.get(number % _PERIOD, "train")]
        start, stop = number * size, (number + 1) * size
        if parts and parts[-1].stop == start:
            start = parts.pop().start
        parts.append(range(start, stop))
    return stretches


def _open_files(path: Path) -> JoinedFiles:
    try:
        if is_special(path):
            raise DataError(f"{path} is a pipe or a device; save the bytes to a file")
        skipped: list[str] = []
        sizes = {path: path.stat().st_size} if not path.is_dir() else _measure_files(path, skipped)
    except FileNotFoundError:
        raise DataError(f"{path} does not exist; pass a file, or a folder of files, as in bytes:PATH") from None
    except OSError as error:
        raise DataError(f"cannot read {path} ({error.strerror or error})") from None
    sizes = {file: size for file, size in sizes.items() if size}
    if not sizes:
        raise DataError(f"{path} has no bytes; pass a file with text, or a folder of such files")
    return JoinedFiles(tuple(sizes), np.cumsum(list(sizes.values())), tuple(skipped))


def _measure_files(folder: Path, skipped: list[str]) -> dict[Path, int]:
    """Return the sizes of all files below `folder`, in the order of their paths. Failures are added to `skipped`."""
    os.listdir(folder)

    def skip(error: OSError) -> None:
        skipped.append(f"cannot read {error.filename} ({error.strerror or error})")

    found: dict[str, Any] = {}
    for place, folders, names in os.walk(folder, onerror=skip):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for path in (Path(place, name) for name in names if not name.startswith(".")):
            try:
                if not is_special(path):
                    with open(path, "rb") as file:  # a file that may not be read is skipped now, not in training
                        found[path.relative_to(folder).as_posix()] = path, os.fstat(file.fileno()).st_size
            except OSError as error:
                skip(error)
    skipped.sort()
    return dict(found[name] for name in sorted(found))
