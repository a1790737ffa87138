"""Reads a compressed file: its blocks, and the items that they hold."""

import hashlib
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray

from linformer_cli.data.sequence import values_to_images
from linformer_cli.errors import DataError
from .coder import Coder, Lanes
from .header import CODED, Header, compute_checksum, read_header
from .items import Item, Pixels
from .pack import Progress, encode_values, require_room


@dataclass(frozen=True)
class Restored:
    """The values int64 [N, T] of a block. `fault` says why they are lost; they are then 0."""

    index: int
    values: NDArray[np.int64]
    fault: str | None


class PackedFile:
    """An open compressed file that can seek.

    Raises `DataError` if the header is damaged, newer than this version, or impossible.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.size = file.seek(0, os.SEEK_END)
        file.seek(0)
        self.header: Header = read_header(file, self.size)
        sizes = [block.size for block in self.header.blocks]
        # The place of each block, and of the end.
        self._places = [file.tell(), *(file.tell() + np.cumsum(sizes, dtype=object))]

    @property
    def surplus(self) -> int:
        """The bytes after the last block, which should be 0; negative if the file was cut."""
        return self.size - int(self._places[-1])

    def require_program(self, program: bytes, name: str) -> None:
        """Raise `DataError` unless `program`, the SHA-256 of the program of model `name`, wrote the file."""
        if program != self.header.program:
            wrote = f" ('{self.header.checkpoint}')" if self.header.checkpoint else ""
            raise DataError(
                f"it was written with another model{wrote}: its program has the SHA-256 "
                f"{self.header.program.hex()[:16]}..., that of '{name}' {program.hex()[:16]}..."
            )

    def read_blocks(self, coder: Coder, batch: int, report: Progress) -> Iterator[Restored]:
        """Decode the blocks in order, about `batch` sequences at once, but at least one block.

        A damaged block is lost alone. `report` is called with the number of sequences that are done. Raises
        `LintxError` if there is not enough memory.
        """
        header, done = self.header, 0
        blocks, at_once = range(len(header.blocks)), max(1, batch // header.block)
        if blocks:
            at_most = min(at_once * header.block, header.contents.sequences)
            require_room(coder, at_most, header.contents.tiling.positions)
        for start in blocks[::at_once]:
            part = blocks[start : start + at_once]
            for restored in self._read_batch(coder, part):
                done += len(restored.values)
                report(done)
                yield restored

    def _read_batch(self, coder: Coder, blocks: range) -> list[Restored]:
        header = self.header
        rows = [header.rows(index) for index in blocks]
        data = {index: self._read_data(index) for index in blocks}
        coded = [index for index in blocks if header.blocks[index].method == CODED and data[index] is not None]
        lengths = {index: header.contents.lengths(*each) for index, each in zip(blocks, rows, strict=True)}
        lanes = Lanes(
            np.concatenate([lengths[index] for index in coded] or [np.empty(0, np.int64)]),
            [len(lengths[index]) for index in coded],
        )
        decoded = coder.decode(lanes, [data[index] or b"" for index in coded])
        found = {index: decoded[own] for index, own in lanes.pair(coded)}
        return [self._check(index, data[index], found.get(index), len(lengths[index])) for index in blocks]

    def _read_data(self, index: int) -> bytes | None:
        """The data of a block, or None if the file ends before."""
        block = self.header.blocks[index]
        if self._places[index] + block.size > self.size:
            return None
        self._file.seek(self._places[index])
        data = self._file.read(block.size)
        return data if len(data) == block.size else None

    def _check(self, index: int, data: bytes | None, values: NDArray[np.int64] | None, count: int) -> Restored:
        header, width = self.header, self.header.contents.tiling.positions
        block, fault = header.blocks[index], None
        whole = np.zeros((count, width), dtype=np.int64)
        if data is None:
            fault = "the file is cut short"
        elif values is not None:
            whole[:, : values.shape[1]] = values
        else:
            inflated = _inflate(data, count * width)
            if len(inflated) == count * width:
                whole = np.frombuffer(inflated, dtype=np.uint8).astype(np.int64).reshape(count, width)
        if data is not None and compute_checksum(encode_values(whole), compute_checksum(data)) != block.checksum:
            fault = "its checksum is wrong"
        if fault is None and whole.max(initial=0) >= header.contents.tiling.shape.levels:
            fault = "it has values that the model lacks"
        return Restored(index, whole if fault is None else np.zeros_like(whole), fault)


def _inflate(data: bytes, most: int) -> bytes:
    inflater = zlib.decompressobj()
    try:
        return inflater.decompress(data, most + 1)
    except zlib.error:
        return b""


@dataclass(frozen=True)
class Part:
    """A part of an item: adjacent sequences, uint8 [N, H, W, C].

    `lost` marks the sequences of damaged blocks, bool [N]; their pixels are 0. `last` is true for the item's last part.
    """

    item: Item
    tiles: Pixels
    lost: NDArray[np.bool_]
    last: bool


def iter_parts(header: Header, blocks: Iterator[Restored]) -> Iterator[Part]:
    """Divide all blocks of a file among its items. Empty items have one part without sequences."""
    contents = header.contents
    shape, index = contents.tiling.shape, 0
    for block in blocks:
        begin, stop = header.rows(block.index)
        start = begin
        tiles = values_to_images(torch.from_numpy(block.values), shape)
        while start < stop:
            _, end = contents.rows(index)
            upto = min(stop, end)
            rows = slice(start - begin, upto - begin)
            lost = np.full(upto - start, block.fault is not None)
            yield Part(contents.item(index), tiles[rows], lost, upto == end)
            start = upto
            index += upto == end
    for rest in range(index, contents.count):
        tiles = np.zeros((0, shape.height, shape.width, shape.channels), np.uint8)
        yield Part(contents.item(rest), tiles, np.zeros(0, bool), True)


def digest_values(blocks: Iterator[Restored]) -> bytes:
    """The SHA-256 of the values of all blocks. Raises `DataError` if a block is lost."""
    digest = hashlib.sha256()
    for block in blocks:
        if block.fault is not None:
            raise DataError(f"block {block.index} is lost: {block.fault}")
        digest.update(encode_values(block.values))
    return digest.digest()
