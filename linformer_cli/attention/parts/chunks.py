"""Sequences cut into chunks, and all pairs of positions in a chunk by recursive halving.

In pieces of 2, 4, 8 .. positions, the second half is paired with the first half. Together with the pairs (t, t), this
covers every pair j <= t once, with one batched matrix product per size.
"""

from collections.abc import Iterator
from typing import Annotated

from pydantic import AfterValidator, Field
from torch import Tensor
from torch.nn import functional

from linformer_cli.attention.base import Chunk


def cut_chunks(x: Tensor, chunk: int, value: float = 0.0) -> Tensor:
    """Return x [..., T, W] as [..., chunks, chunk, W], with `value` after the last position. Copies only if needed."""
    fill = -x.shape[-2] % chunk
    return (functional.pad(x, (0, 0, 0, fill), value=value) if fill else x).unflatten(-2, (-1, chunk))


def _power_of_two(chunk: int) -> int:
    if chunk & (chunk - 1):
        raise ValueError("must be a power of two, such as 32 or 64")
    return chunk


# A chunk that can be halved down to one position.
PowerOfTwoChunk = Annotated[
    Chunk, AfterValidator(_power_of_two), Field(description="positions per chunk of the parallel form, a power of two")
]


def iter_halves(positions: int) -> Iterator[int]:
    """Return the numbers 1, 2, 4, .. up to positions / 2, where `positions` is a power of two."""
    half = 1
    while half < positions:
        yield half
        half *= 2


def split_halves(x: Tensor, half: int) -> tuple[Tensor, Tensor]:
    """Return views [..., R / (2 half), half, C] of the first and the second half of each piece of x [..., R, C]."""
    first, second = x.unflatten(-2, (-1, 2, half)).unbind(-3)
    return first, second


def corners(pairs: Tensor, half: int) -> Tensor:
    """View pairs [..., R, R] as [..., R / (2 half), half, half]: those of each piece's second half with its first."""
    blocks = split_halves(pairs, half)[1].unflatten(-1, (-1, 2, half))[..., 0, :]
    return blocks.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)
