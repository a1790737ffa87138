"""Writes a compressed file: a header, and blocks of coded sequences."""

import hashlib
import math
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from linformer_cli.errors import DataError, UsageError
from linformer_cli.system.memory import require_memory
from .coder import Coder, Lanes
from .header import CODED, DEFLATED, LARGEST_DATA, Block, Header, compute_checksum, count_blocks, encode_header
from .sources import Piece, Source

Progress = Callable[[int], None]
# By default, the states of a block take at most this much memory, and a block has at most this many sequences.
_BLOCK_BYTES, _DEFAULT_BLOCK = 2**29, 500
# The work of a step needs some memory besides the state.
_STATE_MARGIN = 1.2
# A value is held as int64 twice, as int32, and once more while the parts of a batch are joined.
_BYTES_PER_VALUE = 28


@dataclass(frozen=True)
class Packed:
    """What was written: `size` bytes. `nats` are the model's own, with the classes if they are stored.

    `digest` is the SHA-256 of all values.
    """

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
    """The default number of sequences in a block, for a model with `state_bytes` for each sequence."""
    return max(1, min(_DEFAULT_BLOCK, _BLOCK_BYTES // max(1, state_bytes)))


def require_room(coder: Coder, batch: int, positions: int) -> None:
    """Raise `LintxError` if `batch` sequences of `positions` values, with their states, do not fit in free memory."""
    states = _STATE_MARGIN * coder.model.state_bytes(batch)
    require_memory(states + _BYTES_PER_VALUE * batch * positions, "cpu", f"{batch:,} sequences at once")


def write_packed(file: BinaryIO, header: Header, source: Source, coder: Coder, batch: int, report: Progress) -> Packed:
    """Write `header`, whose blocks are still missing, and the blocks of `source` to an empty file that can seek.

    About `batch` sequences are coded at once, but at least one block. `report` is called with the number of sequences
    that are done. Memory does not depend on the number of sequences, except for their names and the entries of the
    blocks. Raises `LintxError` if there is not enough memory, and the errors of `source` and `coder`.
    """
    contents, size = header.contents, header.block
    batch = max(1, batch // size) * size
    require_room(coder, min(batch, contents.sequences), contents.tiling.positions)
    blocks: list[Block] = []
    nats, digest, done = 0.0, hashlib.sha256(), 0
    # The header comes first and contains the sizes of all blocks, so it is written last.
    empty = Block(CODED, 0, 0)
    file.write(encode_header(replace(header, blocks=[empty] * count_blocks(contents, size))))
    for piece in _regroup(source.read(), batch):
        stop = min(done + batch, contents.sequences)
        if done + len(piece.values) != stop:
            raise DataError("the images were changed while they were read; start again")
        lanes = Lanes(contents.lengths(done, stop), _split(stop - done, size))
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
    classes = max(1, coder.model.config.required_classes)
    nats += done * math.log(classes)
    return Packed(done, contents.values, total, nats, sum(block.method for block in blocks), digest.digest())


def encode_values(values: NDArray[np.int64]) -> bytes:
    """One byte for each value [N, T]."""
    return values.astype(np.uint8).tobytes()


def _split(sequences: int, block: int) -> list[int]:
    """The numbers of sequences in the blocks of a batch."""
    return [min(block, sequences - start) for start in range(0, sequences, block)]


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
