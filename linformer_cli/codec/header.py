"""The header of a compressed file (docs/reference/formats.md). It is untrusted: impossible sizes are refused."""

import json
import math
import re
import struct
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from typing import Any, BinaryIO

from linformer_cli.config import ImageShape
from linformer_cli.documents import parse_config, parse_json
from linformer_cli.errors import DataError, UsageError, shorten
from linformer_cli.system.environment import import_extra
from .coder import SEMANTICS
from .items import BANDS, LARGEST_PICTURE, PALETTE_BANDS, Contents, Item, Tiling, check_names

# Increase FORMAT when the layout of files changes, or when the same predictions give other frequencies.
MAGIC, FORMAT = b"LINTXPAK", 1
# The data of a block come from the entropy coder, or are deflated values if that is smaller.
CODED, DEFLATED = 0, 1
LARGEST_BLOCK = 2**16
_MOST_TEXT = 2**24  # a list of names has at most this many bytes: about a million names
_PALETTE = re.compile("([0-9a-f]{8}){1,256}")  # the palette of a picture: at most 256 colours
DEFLATE_FACTOR = 1032  # deflate shrinks its input at most by this factor
# Magic, format, semantics, size of the header, SHA-256 of the program.
_FIXED, _CHECKSUM = struct.Struct("<8sBBI32s"), struct.Struct("<I")
_ENTRY = struct.Struct("<II")  # the entry of a block: twice the size of its data plus its method, and its checksum
LARGEST_DATA = 2**31 - 1  # a block has at most this many bytes of data


@dataclass(frozen=True)
class Block:
    """The entry of a block: its method, the size of its data, and the CRC-32C of its data followed by its values."""

    method: int
    size: int
    checksum: int


@dataclass(frozen=True)
class Header:
    """Everything but the data of the blocks, all of which but the last have `block` sequences.

    `program` is the SHA-256 of the program that predicts the values; `checkpoint` the name of a shipped model, or "".
    """

    program: bytes
    checkpoint: str
    contents: Contents
    block: int
    blocks: Sequence[Block]

    def rows(self, index: int) -> tuple[int, int]:
        """Return the first sequence of block number `index`, and the sequence after its last."""
        return index * self.block, min((index + 1) * self.block, self.contents.sequences)


def count_blocks(contents: Contents, block: int) -> int:
    return -(-contents.sequences // block)


def compute_checksum(data: bytes, before: int = 0) -> int:
    """Return the CRC-32C of `data`, or of what has the checksum `before`, followed by `data`. Needs crc32c."""
    return int(import_extra("crc32c", "compress").crc32c(data, before))


def encode_header(header: Header) -> bytes:
    """Return the bytes of a header, as many for any entries of blocks. Raises `UsageError` for too many names."""
    tiling, name, text = header.contents.tiling, header.checkpoint.encode(), _encode_items(header.contents)
    shape = tiling.shape
    numbers = (
        2 if shape.palette else int(tiling.is_bytes),
        *(shape.channels, shape.height, shape.width, shape.levels),
        *(header.block, header.contents.count, len(name), len(text)),
        *(int.from_bytes(bytes(colour), "big") for colour in shape.colours),
    )
    entries = (_ENTRY.pack(block.size << 1 | block.method, block.checksum) for block in header.blocks)
    body = b"".join((_encode_numbers(numbers), name, text, *entries))
    start = _FIXED.pack(MAGIC, FORMAT, SEMANTICS, _FIXED.size + len(body) + _CHECKSUM.size, header.program) + body
    return start + _CHECKSUM.pack(compute_checksum(start))


def read_header(file: BinaryIO, file_size: int) -> Header:
    """Read the header at the start of a file of `file_size` bytes. Raises `DataError` if it is not a valid one."""
    fixed = file.read(_FIXED.size)
    if not fixed.startswith(MAGIC):
        raise DataError("it is not a file of 'lintx compress'" if fixed else "it is empty")
    if len(fixed) < _FIXED.size:
        raise DataError("it is cut short: even its header is not complete")
    _, found, semantics, size, program = _FIXED.unpack(fixed)
    if found > FORMAT or semantics > SEMANTICS:
        newer = f"format {found}, engine {semantics}; this version reads up to format {FORMAT}, engine {SEMANTICS}"
        raise DataError(f"it was written by a newer lintx ({newer})")
    if found < FORMAT or semantics < SEMANTICS:
        older = f"format {found}, engine {semantics}; this version reads format {FORMAT}, engine {SEMANTICS}"
        raise DataError(f"it was written by an older lintx, whose predictions differ ({older})")
    if size > file_size:
        raise DataError("it is cut short or damaged: even its header is not complete")
    rest = file.read(max(0, size - _FIXED.size))
    body, checksum = rest[: -_CHECKSUM.size], rest[-_CHECKSUM.size :]
    if len(rest) != size - _FIXED.size or checksum != _CHECKSUM.pack(compute_checksum(fixed + body)):
        raise DataError("its header is damaged: its checksum is wrong")
    try:
        header = _parse(program, _Reader(body))
        _require_possible(header)
    except (UsageError, ValueError, KeyError, IndexError) as error:
        raise DataError(f"its header is not valid: {shorten(str(error))}") from None
    return header


def _parse(program: bytes, reader: "_Reader") -> Header:
    """Parse the part between the fixed numbers and the checksum. Raises `DataError`, `UsageError` or `ValueError`."""
    kind, channels, height, width, levels, block, count, name_size, text_size = (reader.number() for _ in range(9))
    palette = [f"#{reader.number():08x}" for _ in range(levels)] if kind == 2 else []
    size = {"channels": channels, "height": height, "width": width, "levels": levels, "palette": palette}
    is_bytes = kind == 1
    tiling = Tiling(parse_config(ImageShape, size, "its image size"), is_bytes)
    if kind > 2 or not 0 < block <= LARGEST_BLOCK or (is_bytes and (height, channels, levels) != (1, 1, 256)):
        raise ValueError("its numbers contradict each other")
    checkpoint = reader.take(name_size).decode()
    contents = _decode_items(reader.take(text_size), tiling, count)
    blocks: list[Block] = []
    for _ in range(count_blocks(contents, block)):
        if not reader.left:
            raise ValueError(f"it promises {contents.sequences:,} images, and has {len(blocks):,} blocks of {block:,}")
        number, checksum = _ENTRY.unpack(reader.take(_ENTRY.size))
        blocks.append(Block(number & 1, number >> 1, checksum))
    if reader.left:
        raise ValueError(f"{reader.left:,} bytes are left over")
    return Header(program, checkpoint, contents, block, blocks)


def _require_possible(header: Header) -> None:
    """Raise `ValueError` if a block is smaller than its values can become."""
    contents = header.contents
    # The frequencies of the other values are at least 1 in 2^24, so each value takes at least this many bits.
    least = -math.log2(1 - (contents.tiling.shape.levels - 1) / 2**24)
    for index, block in enumerate(header.blocks):
        start, stop = header.rows(index)
        values = int(contents.lengths(start, stop).sum())
        most = block.size * DEFLATE_FACTOR if block.method == DEFLATED else (8 * block.size + 64) / least
        if values > most:
            raise ValueError(f"{stop - start:,} images cannot be in the {block.size:,} bytes of block {index}")


def _encode_items(contents: Contents) -> bytes:
    """Return the deflated names as JSON, with sizes unless every item is one tile; b"" for numbered pictures."""
    if not contents.items:
        return b""
    tiling = contents.tiling
    document: list[Any]
    if tiling.is_bytes:
        document = [[item.name, item.width] for item in contents.items]
    elif all(item == tiling.name_tile(item.name) for item in contents.items):
        document = [item.name for item in contents.items]
    else:
        document = [[*astuple(item)[: 5 if item.palette else 4]] for item in contents.items]
    text = json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()
    if len(text) > _MOST_TEXT:
        raise UsageError(f"the names of {len(contents.items):,} items are too long for one file; split them")
    return zlib.compress(text, 9)


def _decode_items(data: bytes, tiling: Tiling, count: int) -> Contents:
    if not count or (tiling.is_bytes and not data):
        raise ValueError("it has no items")
    if not data:
        return Contents(tiling, (), count)
    inflater = zlib.decompressobj()
    try:
        text = inflater.decompress(data, _MOST_TEXT)
    except zlib.error:
        raise ValueError("its list of names is damaged") from None
    document = parse_json(text) if inflater.eof else None
    if not isinstance(document, list) or len(document) != count:
        raise ValueError("its list of names is damaged")
    items = [_decode_item(entry, tiling) for entry in document]
    check_names([item.name for item in items])
    return Contents(tiling, items)


def _decode_item(entry: Any, tiling: Tiling) -> Item:
    if isinstance(entry, str) and not tiling.is_bytes:
        return tiling.name_tile(entry)
    wanted, palette = 2 if tiling.is_bytes else 4, ""
    if tiling.shape.palette and isinstance(entry, list) and len(entry) == 5 and _PALETTE.fullmatch(str(entry[4])):
        *entry, palette = entry
    if isinstance(entry, list) and len(entry) == wanted and isinstance(entry[0], str):
        name, *sizes = entry
        if tiling.is_bytes and type(sizes[0]) is int and 0 <= sizes[0] < 2**48:
            return Item(name, 1, sizes[0], 1)
        whole = not tiling.is_bytes and all(type(size) is int and size > 0 for size in sizes)
        bands = (1, 4) if palette else (PALETTE_BANDS if tiling.shape.palette else BANDS).values()
        if whole and sizes[0] * sizes[1] <= LARGEST_PICTURE and sizes[2] in bands:
            return Item(name, sizes[0], sizes[1], sizes[2], palette)
    raise ValueError("its list of names is damaged")


def _encode_numbers(numbers: Iterable[int]) -> bytes:
    """Encode numbers in groups of 7 bits, lowest first; all groups but the last have the highest bit set (LEB128)."""
    encoded = bytearray()
    for number in numbers:
        while number >= 128:
            encoded.append(number & 127 | 128)
            number >>= 7
        encoded.append(number)
    return bytes(encoded)


class _Reader:
    """Takes numbers and bytes from the front of `data`. Raises `ValueError` at its end."""

    def __init__(self, data: bytes) -> None:
        self._data, self._place = data, 0

    @property
    def left(self) -> int:
        return len(self._data) - self._place

    def take(self, size: int) -> bytes:
        if size > self.left:
            raise ValueError("it ends too early")
        self._place += size
        return self._data[self._place - size : self._place]

    def number(self) -> int:
        """Return the next number of `_encode_numbers`, below 2^63."""
        found = 0
        for shift in range(0, 63, 7):
            (byte,) = self.take(1)
            found |= (byte & 127) << shift
            if byte < 128:
                return found
        raise ValueError("a number has more than 63 bits")
