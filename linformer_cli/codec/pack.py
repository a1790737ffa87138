"""Writes and reads a compressed file: a header, and blocks of coded sequences, which hold items."""

import hashlib
import math
import os
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray

from linformer_cli.data.sequence import values_to_images
from linformer_cli.errors import DataError, UsageError
from linformer_cli.system.memory import require_memory
from .coder import Coder, Lanes
from .header import (
    CODED,
    DEFLATED,
    LARGEST_DATA,
    Block,
    Header,
    compute_checksum,
    count_blocks,
    encode_header,
    read_header,
)
from .items import Item, Pixels
from .sources import Piece, Source

Progress = Callable[[int], None]
# By default, the states of a block take at most this much memory, and a block has at most this many sequences.
_BLOCK_BYTES, _DEFAULT_BLOCK = 2**29, 500
_STATE_MARGIN = 1.2  # the work of a step needs some memory besides the state
_BYTES_PER_VALUE = 28  # a value is held as int64 twice, as int32, and once more while the parts of a batch are joined


@dataclass(frozen=True)
class Packed:
    """A written file, with the model's own `nats`, and the SHA-256 of all values."""

    sequences: int
    values: int
    size: int
    nats: float
    deflated_blocks: int
    digest: bytes

    @property
    def bits_per_dim(self) -> float:
        return 8 * self.size / max(1, self.values)

    @property
    def own_bits_per_dim(self) -> float:
        return self.nats / math.log(2) / max(1, self.values)

    @property
    def overhead_percent(self) -> float:
        """How much larger the file is than the model's own bits."""
        return 100 * (self.bits_per_dim / self.own_bits_per_dim - 1) if self.nats else 0.0


def choose_block(state_bytes: int) -> int:
    """Choose the default number of sequences in a block, for a model with `state_bytes` for each sequence."""
    return max(1, min(_DEFAULT_BLOCK, _BLOCK_BYTES // max(1, state_bytes)))


def require_room(coder: Coder, batch: int, positions: int) -> None:
    """Raise `LintxError` if `batch` sequences of `positions` values, with their states, do not fit in free memory."""
    states = _STATE_MARGIN * coder.model.state_bytes(batch)
    require_memory(states + _BYTES_PER_VALUE * batch * positions, "cpu", f"{batch:,} sequences at once")


def write_packed(file: BinaryIO, header: Header, source: Source, coder: Coder, batch: int, report: Progress) -> Packed:
    """Write `header`, whose blocks are still missing, and the blocks of `source` to an empty file that can seek.

    About `batch` sequences are coded at once, so memory is bounded; `report` gets the number of those done. Raises
    `LintxError` if there is not enough memory, and the errors of `source` and `coder`.
    """
    contents, size = header.contents, header.block
    batch = max(1, batch // size) * size
    require_room(coder, min(batch, contents.sequences), contents.tiling.positions)
    blocks: list[Block] = []
    nats, digest, done = 0.0, hashlib.sha256(), 0
    # The header comes first and contains the sizes of all blocks, so it is written last.
    file.write(encode_header(replace(header, blocks=[Block(CODED, 0, 0)] * count_blocks(contents, size))))
    for piece in _regroup(source.read(), batch):
        stop = min(done + batch, contents.sequences)
        if done + len(piece.values) != stop:
            raise DataError("the images were changed while they were read; start again")
        lanes = Lanes(contents.lengths(done, stop), [min(size, stop - start) for start in range(done, stop, size)])
        coded, own = coder.encode(lanes, piece.values, piece.labels)
        nats += float(own.sum())
        for data, (_, rows) in zip(coded, lanes.pair(coded), strict=True):
            values = encode_values(piece.values[rows])
            digest.update(values)
            deflated = zlib.compress(values, 6)
            method, data = (CODED, data) if len(data) <= len(deflated) else (DEFLATED, deflated)
            if len(data) > LARGEST_DATA:
                raise UsageError("a block is larger than 2 GiB; choose a smaller --block")
            blocks.append(Block(method, len(data), compute_checksum(values, compute_checksum(data))))
            file.write(data)
        done = stop
        report(done)
    if done != contents.sequences:
        raise DataError("the images were changed while they were read; start again")
    total = file.tell()
    file.seek(0)
    file.write(encode_header(replace(header, blocks=blocks)))
    nats += done * math.log(max(1, coder.model.config.required_classes))
    return Packed(done, contents.values, total, nats, sum(block.method for block in blocks), digest.digest())


def encode_values(values: NDArray[np.int64]) -> bytes:
    """Return one byte for each value [N, T]."""
    return values.astype(np.uint8).tobytes()


def _regroup(pieces: Iterator[Piece], batch: int) -> Iterator[Piece]:
    """Join and split pieces so that all but the last have `batch` sequences."""
    waiting: list[Piece] = []
    for piece in pieces:
        waiting.append(piece)
        while sum(len(one.values) for one in waiting) >= batch:
            joined = _join(waiting)
            yield _cut(joined, slice(batch))
            rest = _cut(joined, slice(batch, None))
            waiting = [rest] if len(rest.values) else []
    if waiting:
        yield _join(waiting)


def _join(pieces: list[Piece]) -> Piece:
    labels = [piece.labels for piece in pieces if piece.labels is not None]
    return Piece(np.concatenate([piece.values for piece in pieces]), np.concatenate(labels) if labels else None)


def _cut(piece: Piece, rows: slice) -> Piece:
    return Piece(piece.values[rows], None if piece.labels is None else piece.labels[rows])


@dataclass(frozen=True)
class Restored:
    """The values int64 [N, T] of a block. `fault` says why they are lost; they are then 0."""

    index: int
    values: NDArray[np.int64]
    fault: str | None


class PackedFile:
    """An open compressed file that can seek. Raises `DataError` if its header is damaged, newer or impossible."""

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
            hashes = f"{self.header.program.hex()[:16]}..., that of '{name}' {program.hex()[:16]}..."
            raise DataError(f"it was written with another model{wrote}: its program has the SHA-256 {hashes}")

    def read_blocks(self, coder: Coder, batch: int, report: Progress) -> Iterator[Restored]:
        """Decode blocks in order, about `batch` sequences at once. A damaged one is lost alone."""
        header, done = self.header, 0
        blocks, at_once = range(len(header.blocks)), max(1, batch // header.block)
        if blocks:
            at_most = min(at_once * header.block, header.contents.sequences)
            require_room(coder, at_most, header.contents.tiling.positions)
        for start in blocks[::at_once]:
            for restored in self._read_batch(coder, blocks[start : start + at_once]):
                done += len(restored.values)
                report(done)
                yield restored

    def _read_batch(self, coder: Coder, blocks: range) -> list[Restored]:
        header = self.header
        rows = [header.rows(index) for index in blocks]
        data = {index: self._read_data(index) for index in blocks}
        coded = [index for index in blocks if header.blocks[index].method == CODED and data[index] is not None]
        lengths = {index: header.contents.lengths(*each) for index, each in zip(blocks, rows, strict=True)}
        of_lanes = [lengths[index] for index in coded]
        lanes = Lanes(np.concatenate(of_lanes or [np.empty(0, np.int64)]), [*map(len, of_lanes)])
        decoded = coder.decode(lanes, [data[index] or b"" for index in coded])
        found = {index: decoded[own] for index, own in lanes.pair(coded)}
        return [self._check(index, data[index], found.get(index), len(lengths[index])) for index in blocks]

    def _read_data(self, index: int) -> bytes | None:
        """Return the data of a block, or None if the file ends before."""
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
    """Adjacent sequences uint8 [N, H, W, C] of an item. Those of damaged blocks are `lost`, bool [N], and 0."""

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
            yield Part(contents.item(index), tiles[rows], np.full(upto - start, block.fault is not None), upto == end)
            start = upto
            index += upto == end
    for rest in range(index, contents.count):
        tiles = np.zeros((0, shape.height, shape.width, shape.channels), np.uint8)
        yield Part(contents.item(rest), tiles, np.zeros(0, bool), True)


def digest_values(blocks: Iterator[Restored]) -> bytes:
    """Return the SHA-256 of the values of all blocks. Raises `DataError` if a block is lost."""
    digest = hashlib.sha256()
    for block in blocks:
        if block.fault is not None:
            raise DataError(f"block {block.index} is lost: {block.fault}")
        digest.update(encode_values(block.values))
    return digest.digest()
