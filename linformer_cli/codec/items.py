"""What a compressed file contains: pictures or files with their names, cut into sequences of the model's size."""

import math
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from linformer_cli.config import ImageShape
from linformer_cli.errors import DataError, shorten
from linformer_cli.units import printable

Pixels = NDArray[np.uint8]

# Bounds of a path, and of its parts, in UTF-8. Most systems allow 255 bytes, and damaged files get longer names.
_LONGEST_PATH, _LONGEST_PART = 1024, 240
# A file or picture that is lost in part is written under this name, with zeros in place of what is lost.
DAMAGED = "damaged-{}"
# A picture can have this many pixels. Pillow refuses to open larger ones.
LARGEST_PICTURE = 2**27
# The modes of pictures that are kept as they are, and their bands: in general, and for models with a palette.
BANDS = {"L": 1, "LA": 2, "RGB": 3, "RGBA": 4}
PALETTE_BANDS = {"P": 1, "RGB": 3, "RGBA": 4}


@dataclass(frozen=True)
class Item:
    """A picture [height, width, bands], or a file with `width` bytes in one row and one band.

    An indexed picture has its own `palette`, unless it is the model's: red, green, blue and opacity of each colour in
    hexadecimal. That of an RGBA picture has the colour under its transparent pixels, unless it is black.
    """

    name: str
    height: int
    width: int
    bands: int
    palette: str = ""

    @property
    def colours(self) -> NDArray[np.uint8]:
        """The colours [N, 4] of the item's own palette."""
        return np.frombuffer(bytes.fromhex(self.palette), np.uint8).reshape(-1, 4)


@dataclass(frozen=True)
class Tiling:
    """How items are cut into tiles, which are images for a model of `shape`.

    A file of bytes is cut into windows of which the last may be shorter. A picture is cut into planes of as many bands
    as the shape has channels, and each into tiles, row by row, which repeat the last pixels and the last band where
    they end. With a palette, every picture is one plane of numbers of colours.
    """

    shape: ImageShape
    is_bytes: bool

    @property
    def positions(self) -> int:
        return self.shape.positions

    def grid(self, item: Item) -> tuple[int, int, int]:
        """Return the numbers of planes, of rows of tiles and of tiles in a row."""
        shape = self.shape
        planes = 1 if shape.palette else -(-item.bands // shape.channels)
        return planes, -(-item.height // shape.height), -(-item.width // shape.width)

    def count(self, item: Item) -> int:
        return math.prod(self.grid(item))

    def count_values(self, item: Item) -> int:
        return item.height * item.width * (1 if self.shape.palette else item.bands)

    def name_tile(self, name: str) -> Item:
        return Item(name, self.shape.height, self.shape.width, self.shape.channels)

    def cut(self, picture: Pixels) -> Pixels:
        """Return the tiles [N, H, W, C] of a picture [height, width, bands]."""
        shape = self.shape
        planes, down, across = self.grid(Item("", *picture.shape))
        missing = (down * shape.height, across * shape.width, planes * shape.channels)
        padding = [(0, wanted - found) for wanted, found in zip(missing, picture.shape, strict=True)]
        whole = np.pad(picture, padding, mode="edge")
        split = whole.reshape(down, shape.height, across, shape.width, planes, shape.channels)
        return split.transpose(4, 0, 2, 1, 3, 5).reshape(-1, shape.height, shape.width, shape.channels)

    def join(self, item: Item, tiles: Pixels) -> Pixels:
        """Return the picture whose tiles are `tiles`."""
        shape = self.shape
        planes, down, across = self.grid(item)
        split = tiles.reshape(planes, down, across, shape.height, shape.width, shape.channels)
        whole = split.transpose(1, 3, 2, 4, 0, 5)
        whole = whole.reshape(down * shape.height, across * shape.width, planes * shape.channels)
        return np.ascontiguousarray(whole[: item.height, : item.width, : item.bands])


@dataclass(frozen=True)
class Contents:
    """The items of a file in order. Without `items`, they are `numbered` pictures of one tile each."""

    tiling: Tiling
    items: Sequence[Item]
    numbered: int = 0

    @property
    def count(self) -> int:
        return len(self.items) or self.numbered

    def item(self, index: int) -> Item:
        return self.items[index] if self.items else self.tiling.name_tile(f"{index:05d}.png")

    @cached_property
    def _ends(self) -> NDArray[np.int64]:
        """For each of `items`, the number of sequences up to its end."""
        counts = [self.tiling.count(item) for item in self.items]
        if sum(counts) >= 2**62:
            raise DataError("it promises more than any file can hold")
        return np.cumsum(counts, dtype=np.int64)

    @property
    def sequences(self) -> int:
        return int(self._ends[-1]) if self.items else self.numbered

    @property
    def values(self) -> int:
        """The number of values of all items, without those that tiles repeat."""
        return sum(map(self.tiling.count_values, self.items)) if self.items else self.numbered * self.tiling.positions

    def rows(self, index: int) -> tuple[int, int]:
        """Return the first sequence of item number `index`, and the sequence after its last."""
        if not self.items:
            return index, index + 1
        return int(self._ends[index - 1]) if index else 0, int(self._ends[index])

    @property
    def unit(self) -> str:
        if self.tiling.is_bytes:
            return "windows"
        return "images" if self.sequences == self.count else "tiles"

    def lengths(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return the number of values of the sequences `start` to `stop - 1`, int64."""
        found = np.full(stop - start, self.tiling.positions, dtype=np.int64)
        if self.tiling.is_bytes:
            first, last = np.searchsorted(self._ends, [start + 1, stop])
            for index in range(int(first), min(int(last) + 1, self.count)):
                end, size = int(self._ends[index]), self.items[index].width
                if size and start < end <= stop:
                    found[end - 1 - start] = (size - 1) % self.tiling.positions + 1
        return found


def check_names(names: Sequence[str]) -> None:
    """Raise `DataError` for a name that could leave the folder it is written to, or that is given twice."""
    for name in names:
        check_name(name)
    check_clashes(names)


def check_name(name: str) -> None:
    """Raise `DataError` for a name that could leave the folder it is written to, on any system."""
    if (fault := _find_fault(name)) is not None:
        raise DataError(f"the name '{_show(name)}' {fault}")


def check_clashes(names: Sequence[str]) -> None:
    """Raise `DataError` if two items would be written to the same place."""
    known = set(names)
    if len(known) < len(names):
        seen: set[str] = set()
        twice = next(name for name in names if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise DataError(f"two items have the name '{_show(twice)}'")
    for name in names:
        folder, slash, own = name.rpartition("/")
        if (damaged := folder + slash + DAMAGED.format(own)) in known:
            raise DataError(f"the name '{_show(damaged)}' is kept for what may be left of '{_show(name)}'")
        parts = name.split("/")
        inside = next(("/".join(parts[:n]) for n in range(1, len(parts)) if "/".join(parts[:n]) in known), None)
        if inside is not None:
            raise DataError(f"the name '{_show(inside)}' is also a folder of '{_show(name)}'")


def _show(name: str) -> str:
    return printable(shorten(name, 80))


def _find_fault(name: str) -> str | None:
    try:
        encoded = name.encode()
    except UnicodeEncodeError:
        return "is not UTF-8"
    parts = name.split("/")
    if any(part in ("", ".", "..") for part in parts):
        return "must be a relative path without '.' or '..'"
    # A backslash and a colon separate parts of a path on Windows.
    if any(sign in "\\:" or unicodedata.category(sign) == "Cc" for sign in name):
        return "has a backslash, a colon or a control character"
    if len(encoded) > _LONGEST_PATH or any(len(part.encode()) > _LONGEST_PART for part in parts):
        return f"is longer than {_LONGEST_PART} bytes in a part or {_LONGEST_PATH} in all"
    return None
