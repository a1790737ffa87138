"""Writes a program and its weights as one file, or as the same bytes in memory, for the functions of runner.h.

The format is described in docs/reference/formats.md.
"""

import struct
import zlib
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from .packing import count_words, pack
from .program import Buffer, Kind, Operation, Program

SUFFIX = ".lintx"
MAGIC = b"LINTXPRG"
# The bytes of a buffer in the header.
_BUFFER_BYTES = 40
# The checksum is the word before these bytes.
_CHECKED = 32
_CHECKSUM = _CHECKED - 8
# Shared data starts at multiples of this number of bytes.
ALIGNMENT = 64
# The index of a type in this list is its code in a file.
TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int16, torch.int32, torch.int64)


@dataclass(frozen=True)
class Images:
    """What a program draws. `mixtures` is 0 for a head with one logit per level. `bounds` limit the log scales."""

    channels: int
    height: int
    width: int
    levels: int
    classes: int
    mixtures: int = 0
    bounds: tuple[float, float] = (0.0, 0.0)


def encode_program(program: Program, images: Images) -> bytes:
    """Return the bytes of a program file. Weights are packed as the engine needs them."""
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
    # Format 2 has one more word. Programs without it keep format 1, so that compressed files still name their program.
    start = MAGIC + _integers(2 if program.blocks else 1, end, 0)
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
    return count_words(buffer.tensor, buffer.dtype)


def _encode_facts(program: Program, images: Images) -> bytes:
    """The header up to the number of buffers, without the first words."""
    order = 0  # raster order, with the channels of a pixel adjacent
    parts = [
        _integers(images.channels, images.height, images.width, images.levels, order, images.mixtures),
        _reals(*images.bounds),
        _integers(images.classes, program.window, *([program.blocks] if program.blocks else [])),
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
