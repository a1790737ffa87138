"""Writes a program and its weights as one file, which runner.h reads without Python.

The format is described in docs/reference/formats.md.
"""

import struct
import zlib
from dataclasses import dataclass

import torch

from .packing import pack
from .program import Buffer, Kind, Operation, Program

SUFFIX = ".lintx"
MAGIC = b"LINTXPRG"
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
    buffers = [_bind(buffer) for buffer in program.buffers]
    # The size of the header does not depend on the offsets in it.
    header = len(_encode_header(program, images, buffers, [0] * len(buffers))) + 32
    offsets, end = [], header
    for buffer in buffers:
        end += -end % ALIGNMENT if buffer.tensor is not None else 0
        offsets.append(end if buffer.tensor is not None else 0)
        end += _data_bytes(buffer)
    body = bytearray(end - 32)
    body[: header - 32] = _encode_header(program, images, buffers, offsets)
    for buffer, offset in zip(buffers, offsets, strict=True):
        if buffer.tensor is not None:
            data = buffer.tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            body[offset - 32 : offset - 32 + len(data)] = data
    # Format 2 has one more word. Programs without it keep format 1, so that compressed files still name their program.
    return MAGIC + _integers(2 if program.blocks else 1, end, zlib.crc32(body)) + bytes(body)


def _bind(buffer: Buffer) -> Buffer:
    """Turn a buffer of weights into the shared buffer that the engine reads. Other buffers are unchanged."""
    if buffer.kind != Kind.WEIGHTS:
        return buffer
    assert buffer.tensor is not None
    packed = pack(buffer.tensor, buffer.dtype)
    return Buffer(Kind.SHARED, packed.numel(), packed.dtype, packed)


def _data_bytes(buffer: Buffer) -> int:
    return 0 if buffer.tensor is None else buffer.width * buffer.dtype.itemsize


def _encode_header(program: Program, images: Images, buffers: list[Buffer], offsets: list[int]) -> bytes:
    order = 0  # raster order, with the channels of a pixel adjacent
    parts = [
        _integers(images.channels, images.height, images.width, images.levels, order, images.mixtures),
        _reals(*images.bounds),
        _integers(images.classes, program.window, *([program.blocks] if program.blocks else [])),
        _integers(program.recent, program.label, program.output),
        _integers(len(program.states)),
        *(_integers(len(layer), *layer) for layer in program.states),
        _integers(len(buffers)),
        *(_encode_buffer(buffer, offset) for buffer, offset in zip(buffers, offsets, strict=True)),
        _integers(len(program.operations)),
        *(_encode_operation(operation) for operation in program.operations),
    ]
    return b"".join(parts)


def _encode_buffer(buffer: Buffer, offset: int) -> bytes:
    kind_and_size = _integers(buffer.kind, TYPES.index(buffer.dtype), buffer.width)
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
