"""Writes a program with its weights as a file, or as its bytes in memory; docs/reference/formats.md has the format."""

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from .constants import LANES, TILE_ROWS
from .program import Buffer, Kind, Operation, Program

SUFFIX = ".lintx"
MAGIC = b"LINTXPRG"
_BUFFER_BYTES = 40  # the bytes of a buffer in the header
# The checksum is the word before these bytes.
_CHECKED = 32
_CHECKSUM = _CHECKED - 8
ALIGNMENT = 64  # shared data starts at multiples of this number of bytes
# The index of a type in this list is its code in a file.
TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int16, torch.int32, torch.int64)


@dataclass(frozen=True)
class Images:
    """The images of a program. `mixtures` is 0 for a head with one logit per level. `bounds` limit the log scales."""

    channels: int
    height: int
    width: int
    levels: int
    classes: int
    mixtures: int = 0
    bounds: tuple[float, float] = (0.0, 0.0)
    palette: Sequence[tuple[int, ...]] = ()


def encode_program(program: Program, images: Images) -> bytes:
    data = lay_out_program(program, images)
    data[_CHECKSUM:_CHECKED] = np.frombuffer(_integers(zlib.crc32(data[_CHECKED:].data)), np.uint8)
    return data.tobytes()


def lay_out_program(program: Program, images: Images) -> NDArray[np.uint8]:
    """Return a program file without its checksum, in memory that begins at a multiple of `ALIGNMENT`."""
    before, after = _encode_facts(program, images), b"".join(map(_encode_operation, program.operations))
    end = _CHECKED + len(before) + len(program.buffers) * _BUFFER_BYTES + 8 + len(after)
    buffers, offsets = b"", []
    for buffer in program.buffers:
        end += -end % ALIGNMENT if buffer.tensor is not None else 0
        offsets.append(end)
        buffers += _encode_buffer(buffer, 0 if buffer.tensor is None else end)
        end += 0 if buffer.tensor is None else _count_numbers(buffer) * _stored_type(buffer).itemsize
    # Later formats have more words. Programs without these keep format 1, so that compressed files still name them.
    start = MAGIC + _integers(3 if images.palette else 2 if program.blocks else 1, end, 0)
    header = start + before + buffers + _integers(len(program.operations)) + after
    memory = np.zeros(end + ALIGNMENT, np.uint8)
    data = memory[-memory.ctypes.data % ALIGNMENT :][:end]
    data[: len(header)] = np.frombuffer(header, np.uint8)
    for buffer, offset in zip(program.buffers, offsets, strict=True):
        if buffer.tensor is not None:
            tensor = pack(buffer.tensor, buffer.dtype) if buffer.kind == Kind.WEIGHTS else buffer.tensor.cpu()
            found = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
            data[offset : offset + len(found)] = found
    return data


def _stored_type(buffer: Buffer) -> torch.dtype:
    return torch.int32 if buffer.kind == Kind.WEIGHTS else buffer.dtype


def _count_numbers(buffer: Buffer) -> int:
    if buffer.kind != Kind.WEIGHTS or buffer.tensor is None:
        return buffer.width
    return count_packed_words(buffer.tensor, buffer.dtype)


def _encode_facts(program: Program, images: Images) -> bytes:
    """Encode the header from after its first words to the number of buffers."""
    order = 0  # raster order, with the channels of a pixel adjacent
    added = [program.blocks] if program.blocks or images.palette else []
    added += [int.from_bytes(bytes(colour), "little") for colour in images.palette]
    parts = [
        _integers(images.channels, images.height, images.width, images.levels, order, images.mixtures),
        _reals(*images.bounds),
        _integers(images.classes, program.window, *added),
        _integers(program.recent, program.label, program.output),
        _integers(len(program.states)),
        *(_integers(len(layer), *layer) for layer in program.states),
        _integers(len(program.buffers)),
    ]
    return b"".join(parts)


def _encode_buffer(buffer: Buffer, offset: int) -> bytes:
    kind = Kind.SHARED if buffer.kind == Kind.WEIGHTS else buffer.kind
    kind_and_size = _integers(kind, TYPES.index(_stored_type(buffer)), _count_numbers(buffer))
    return kind_and_size + _reals(buffer.initial) + _integers(offset)


def _encode_operation(operation: Operation) -> bytes:
    name = operation.name.encode().ljust(32, b"\0")
    assert len(name) == 32, f"the name {operation.name} is too long"
    counted = (_integers(len(part), *part) for part in (operation.buffers, operation.integers))
    return name + b"".join(counted) + _integers(len(operation.reals)) + _reals(*operation.reals)


def _integers(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}q", *values)


def _reals(*values: float) -> bytes:
    return struct.pack(f"<{len(values)}d", *values)


def pack(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return weights [rows, columns] in the layout of `project`: [rows / 16, words per row, 16] words of 32 bits.

    A word is one float, two bfloat16 numbers or four 8-bit integers, filled with zeros. A row of integers has two more
    words: its scale as a float, and the sum of its integers.
    """
    missing_columns, missing_rows = -weight.shape[1] % (4 // dtype.itemsize), -len(weight) % TILE_ROWS
    weight = functional.pad(weight, (0, missing_columns, 0, missing_rows))
    if dtype != torch.int8:
        return _arrange(weight.to(dtype))
    integers, scales = quantise(weight)
    sums = integers.sum(dim=1, dtype=torch.int32)
    tail = torch.stack((scales.view(torch.int32), sums), dim=1)
    return torch.cat((_arrange(integers), _arrange(tail)), dim=1)


def count_packed_words(weight: Tensor, dtype: torch.dtype) -> int:
    rows, columns = weight.shape
    numbers = 4 // dtype.itemsize
    return (rows + -rows % TILE_ROWS) * (-(-columns // numbers) + (2 if dtype == torch.int8 else 0))


def _arrange(rows: Tensor) -> Tensor:
    """Return rows that consist of whole words as int32 [rows / 16, words, 16]."""
    panels: Tensor = rows.contiguous().view(torch.int32).unflatten(0, (-1, LANES))
    return panels.transpose(1, 2).contiguous()


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return int8 [rows, columns] from -127 to 127, and the factor float32 [rows] of each row (NaN unless finite)."""
    weight = weight.float()
    scales = weight.abs().amax(dim=1) / 127
    scales = scales.where(scales.isfinite(), torch.nan)
    return (weight / scales.unsqueeze(1)).round().clamp(-127, 127).nan_to_num(0).to(torch.int8), scales
