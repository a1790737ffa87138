"""Where the sequences of a compressed file come from: pictures, files of bytes, or a data set."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from linformer_cli.config import ImageShape
from linformer_cli.data.look import name_colour
from linformer_cli.data.pictures import open_picture
from linformer_cli.data.sequence import find_numbers, images_to_values, paint, values_to_images
from linformer_cli.errors import DataError
from .items import BANDS, PALETTE_BANDS, Contents, Item, Pixels, Tiling

# A piece has at most this many images or windows.
_PIECE = 256
_ORIENTATION, _BITS_PER_SAMPLE = 0x0112, 0x0102


@dataclass(frozen=True)
class Piece:
    """Adjacent sequences: values int64 [N, T], 0 after the ends of `Contents.lengths`, and their classes int64 [N]."""

    values: NDArray[np.int64]
    labels: NDArray[np.int64] | None = None


class Source(Protocol):
    """Items in order, and their sequences in pieces of any size. Each call of `read` begins again."""

    @property
    def contents(self) -> Contents: ...

    def read(self) -> Iterator[Piece]: ...


@dataclass(frozen=True)
class ArraySource:
    """Images uint8 [N, H, W, C] of a data set, which get numbers as names."""

    images: NDArray[np.uint8]
    labels: NDArray[np.int64] | None
    shape: ImageShape

    @property
    def contents(self) -> Contents:
        return Contents(Tiling(self.shape, False), (), len(self.images))

    def read(self) -> Iterator[Piece]:
        for start in range(0, len(self.images), _PIECE):
            rows = slice(start, start + _PIECE)
            labels = None if self.labels is None else self.labels[rows]
            yield Piece(_to_values(self.images[rows], self.shape, "the data set"), labels)


@dataclass(frozen=True)
class PictureSource:
    contents: Contents
    files: Sequence[Path | bytes]
    label: int | None = None

    def read(self) -> Iterator[Piece]:
        tiling = self.contents.tiling
        for index, file in enumerate(self.files):
            item = self.contents.item(index)
            pixels = read_picture(file, item.name, tiling.shape)
            if pixels.shape != (item.height, item.width, item.bands):
                raise DataError(f"'{item.name}' was changed while it was read; start again")
            if tiling.shape.palette:
                pixels = _number_colours(pixels, item, tiling.shape)
            tiles = tiling.cut(pixels)
            for start in range(0, len(tiles), _PIECE):
                part = tiles[start : start + _PIECE]
                labels = None if self.label is None else np.full(len(part), self.label)
                yield Piece(_to_values(part, tiling.shape, f"'{item.name}'"), labels)


@dataclass(frozen=True)
class ByteSource:
    contents: Contents
    files: Sequence[Path | BinaryIO]
    label: int | None = None

    def read(self) -> Iterator[Piece]:
        for file, item in zip(self.files, self.contents.items, strict=True):
            if isinstance(file, Path):
                try:
                    with open(file, "rb") as opened:
                        yield from self._cut(opened, item)
                except OSError as error:
                    raise DataError(f"cannot read {file} ({error.strerror or error})") from None
            else:
                file.seek(0)
                yield from self._cut(file, item)

    def _cut(self, file: BinaryIO, item: Item) -> Iterator[Piece]:
        length, left = self.contents.tiling.positions, item.width
        while left:
            data = file.read(min(left, _PIECE * length))
            if not data or (len(data) % length and len(data) != left):
                raise DataError(f"'{item.name}' became shorter while it was read; start again")
            left -= len(data)
            values = np.zeros(-(-len(data) // length) * length, dtype=np.int64)
            values[: len(data)] = np.frombuffer(data, dtype=np.uint8)
            rows = values.reshape(-1, length)
            yield Piece(rows, None if self.label is None else np.full(len(rows), self.label))
        if file.read(1):
            raise DataError(f"'{item.name}' became longer while it was read; start again")


def describe_picture(file: Path | bytes, name: str, shape: ImageShape) -> Item:
    """Return a picture's size and palette; without a palette in `shape`, read only its header. See `read_picture`."""
    with _opened(file, name, shape) as picture:
        colours = np.zeros((0, 4), np.uint8)
        if picture.mode == "P":
            bands = picture.getpalette() or []
            strip = Image.frombytes("P", (len(bands) // 3, 1), bytes(range(len(bands) // 3)))
            strip.putpalette(bands)
            strip.info = picture.info
            colours = np.asarray(strip.convert("RGBA"))[0]
        elif picture.mode == "RGBA" and shape.palette:
            pixels = np.asarray(picture)
            hidden = pixels[pixels[..., 3] == 0][:1]
            colours = hidden[hidden.any(axis=1)]
        palette = "" if np.array_equal(colours, shape.colours) else colours.tobytes().hex()
        return Item(name, picture.height, picture.width, (PALETTE_BANDS | BANDS)[picture.mode], palette)


def read_picture(file: Path | bytes, name: str, shape: ImageShape) -> Pixels:
    """Return the pixels of a picture, uint8 [height, width, bands], as they are in the file.

    Raises `DataError` for an unreadable file, and for a picture that would not come back as it is, such as one with
    several frames, more than 8 bits, an orientation, or colours that `shape` has not.
    """
    with _opened(file, name, shape) as picture:
        return np.atleast_3d(np.asarray(picture))


def _number_colours(pixels: Pixels, item: Item, shape: ImageShape) -> Pixels:
    """Return the numbers [height, width, 1] of a picture's colours in the palette of `shape`, or `DataError`."""
    if item.bands == 1:
        colours = item.colours if item.palette else np.array(shape.colours, np.uint8)
        whole = colours[pixels[..., 0].clip(max=len(colours) - 1)]
    else:
        whole = np.pad(pixels, ((0, 0), (0, 0), (0, 4 - item.bands)), constant_values=255)
    numbers = find_numbers(_clear(whole), shape.colours)[..., None]
    if numbers.min() < 0:
        found = name_colour(whole[np.unravel_index(numbers[..., 0].argmin(), numbers.shape[:2])])
        raise DataError(f"'{item.name}' has the colour {found}, which the palette of the model lacks")
    found_numbers = numbers.astype(np.uint8)
    if not np.array_equal(restore_colours(found_numbers, item, shape), pixels):
        reason = "two numbers for one colour" if item.bands == 1 else "several colours under its transparent pixels"
        raise DataError(f"'{item.name}' has {reason}, and would not come back as it is")
    return found_numbers


def _clear(colours: Pixels) -> Pixels:
    """Return colours [..., 4], of which all transparent ones are 0."""
    return np.where(colours[..., 3:] == 0, np.uint8(0), colours)


def restore_colours(numbers: Pixels, item: Item, shape: ImageShape) -> Pixels:
    """Return the pixels [height, width, bands] of an item from the numbers of colours in the palette of `shape`."""
    if item.bands > 1:
        pixels = paint(numbers, shape)
        if item.palette:
            pixels[pixels[..., 3] == 0] = item.colours[0]
        return pixels[..., : item.bands]
    if not item.palette:
        return numbers
    return find_numbers(np.array(shape.colours, np.uint8), _clear(item.colours)).astype(np.uint8)[numbers]


@contextlib.contextmanager
def _opened(file: Path | bytes, name: str, shape: ImageShape) -> Iterator[Image.Image]:
    """Return an open picture whose pixels would come back as they are. Raises `DataError` for any other."""
    with open_picture(file, name) as picture:
        if (fault := _find_fault(picture, bool(shape.palette))) is not None:
            raise DataError(f"'{name}' {fault}; convert it first")
        yield picture


def _find_fault(picture: Image.Image, palette: bool) -> str | None:
    """Say why the pixels of a picture would not come back as they are, or return None."""
    frames = getattr(picture, "n_frames", 1)
    if frames > 1:
        return f"has {frames} frames, and only single pictures are compressed"
    if picture.mode not in (PALETTE_BANDS if palette else BANDS):
        kinds = "a palette or RGB" if palette else "grey or RGB"
        return f"is in mode {picture.mode}, not in {kinds} (with or without alpha) of 8 bits"
    if _may_be_deep(picture):
        return "has, or may have, more than 8 bits per channel, which would be lost"
    if picture.mode in ("L", "RGB") and picture.has_transparency_data:
        return "has a transparent colour, which would be lost"
    if picture.getexif().get(_ORIENTATION, 1) != 1:
        return "is rotated by its EXIF data, which would be lost"
    return None


def _may_be_deep(picture: Image.Image) -> bool:
    """Return whether a picture's file may have more than 8 bits per channel, although Pillow opens it with 8 bits."""
    tiles = [(tile[0], tile[3]) for tile in getattr(picture, "tile", ())]  # decoders and their arguments
    match picture.format:
        case "PNG" | "SGI":
            return any("16" in f"{decoder} {arguments}" for decoder, arguments in tiles)
        case "PPM":
            return any(isinstance(arguments, tuple) and arguments[-1] > 255 for _, arguments in tiles)
        case "TIFF":
            depths: tuple[int, ...] = getattr(picture, "tag_v2", {}).get(_BITS_PER_SAMPLE, (1,))
            return max(depths) > 8
        case "JPEG2000":
            return picture.mode != "L"
        case "AVIF":
            return True
    return False


def _to_values(images: Pixels, shape: ImageShape, name: str) -> NDArray[np.int64]:
    """Return values int64 [N, T] of images. Raises `DataError` for brightnesses that the model's levels lack."""
    values = images_to_values(images, shape)
    if shape.levels < 256 and not np.array_equal(values_to_images(values, shape), images):
        raise DataError(f"{name} has pixels that are not among the model's {shape.levels} levels of brightness")
    return values.numpy()
