"""Tests of the header: what is written is read, and everything else is refused in one line."""

import io
import struct
import zlib
from dataclasses import replace

import numpy as np
import pytest

from linformer_cli.codec.header import Block, Header, compute_checksum, encode_header, read_header
from linformer_cli.codec.items import Contents, Item, Tiling
from linformer_cli.config import ImageShape
from linformer_cli.errors import DataError

pytest.importorskip("crc32c")

PICTURES = Tiling(ImageShape(height=28, width=28), False)
COLOURS = ("#00000000", "#ff8000", "#10203080")
PALETTE = Tiling(ImageShape(height=28, width=28, levels=3, palette=COLOURS), False)
WINDOWS = Tiling(ImageShape(height=1, width=1024), True)
CONTENTS = {
    "numbered": Contents(PICTURES, (), 9),
    "named": Contents(PICTURES, [Item(f"{n}.png", 28, 28, 1) for n in "abcdefghi"]),
    "tiled": Contents(PICTURES, [Item("a.png", 30, 28, 4), Item("b.png", 1, 1, 1)]),
    "palette": Contents(
        PALETTE, [Item("a.png", 28, 28, 1), Item("b.png", 9, 28, 1, "000000ff10203080"), Item("c", 9, 9, 4)]
    ),
    "bytes": Contents(WINDOWS, [Item("empty", 1, 0, 1), Item("a/b", 1, 5000, 1), Item("ä", 1, 3000, 1)]),
}


def build(contents: Contents, **changes: object) -> Header:
    blocks = [Block(n % 2, 1000 + n, 2**31 + n) for n in range(min(99, -(-contents.sequences // 4)))]
    return replace(Header(bytes(range(32)), "mnist-deep", contents, 4, blocks), **changes)


def read(data: bytes) -> Header:
    return read_header(io.BytesIO(data), len(data))


def seal(data: bytes) -> bytes:
    """`data` with the right size and checksum, so that only its contents are wrong."""
    data = data[:10] + struct.pack("<I", len(data) + 4) + data[14:]
    return data + struct.pack("<I", compute_checksum(data))


@pytest.mark.parametrize("contents", CONTENTS.values(), ids=CONTENTS)
def test_a_header_comes_back(contents) -> None:
    header = build(contents)
    found = read(encode_header(header) + b"blocks")
    assert replace(found, contents=header.contents) == header
    assert [found.contents.item(n) for n in range(9)[: contents.count]] == [
        contents.item(n) for n in range(9)[: contents.count]
    ]
    assert found.contents.tiling == contents.tiling


@pytest.mark.parametrize("contents", CONTENTS.values(), ids=CONTENTS)
def test_every_changed_byte_and_every_cut_is_refused(contents, raises_one_line) -> None:
    data = encode_header(build(contents))
    for place in range(len(data)):
        for flip in (1, 128):
            with raises_one_line(DataError):
                read(data[:place] + bytes([data[place] ^ flip]) + data[place + 1 :])
        with raises_one_line(DataError):
            read(data[:place])


@pytest.mark.parametrize("contents", CONTENTS.values(), ids=CONTENTS)
def test_changed_bytes_with_a_right_checksum_raise_at_most_one_line(contents) -> None:
    data, rng = encode_header(build(contents))[:-4], np.random.default_rng(0)
    for _ in range(300):
        changed = bytearray(data)
        for _ in range(rng.integers(1, 4)):
            changed[rng.integers(46, len(data))] = rng.integers(0, 256)
        try:
            found = read(seal(bytes(changed)))
        except DataError as error:
            assert "\n" not in str(error) and len(str(error)) < 400
        else:
            assert found.contents.count and len(found.blocks) == -(-found.contents.sequences // found.block)


def test_versions_have_their_own_message(raises_one_line) -> None:
    data = encode_header(build(CONTENTS["named"]))[:-4]
    for place in (8, 9):
        for version, word in ((2, "newer"), (0, "older")):
            with raises_one_line(DataError, word):
                read(seal(data[:place] + bytes([version]) + data[place + 1 :]))


@pytest.mark.parametrize("count", [10**9, 2**62, 60_000])
def test_more_images_than_the_blocks_can_hold_are_refused(count, raises_one_line) -> None:
    """A thousand million images are promised in a hundred bytes."""
    header = build(Contents(PICTURES, (), count), block=2**16, blocks=[Block(0, 1, 0)])
    with raises_one_line(DataError, "images"):
        read(encode_header(header))


def test_a_bomb_of_names_is_refused(raises_one_line) -> None:
    text = zlib.compress(b" " * (2**26 + 1), 9)
    data = encode_header(build(CONTENTS["named"]))[:-4]
    named = zlib.compress(b'["a.png","b.png","c.png","d.png","e.png","f.png","g.png","h.png","i.png"]', 9)
    assert named in data
    start = data.index(named)
    size = len(text)
    varint = bytes([size & 127 | 128, size >> 7 & 127 | 128, size >> 14])
    changed = data[: start - len("mnist-deep") - 1] + varint + b"mnist-deep" + text + data[start + len(named) :]
    with raises_one_line(DataError, "names"):
        read(seal(changed))


def test_dangerous_names_are_refused(raises_one_line) -> None:
    header = build(Contents(PICTURES, [Item("../a.png", 28, 28, 1)]), blocks=[Block(0, 1000, 0)])
    with raises_one_line(DataError, "../a.png"):
        read(encode_header(header))
