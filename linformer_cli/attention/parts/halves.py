"""All pairs of positions of a chunk by halves: in pieces of 2, 4, 8 .. positions the second half meets the first.

Beside the pairs of a position with itself these are all, each once, in one product of matrices for every size.
"""

from collections.abc import Iterator
from typing import Annotated

from pydantic import AfterValidator
from torch import Tensor


def _require_power_of_two(chunk: int) -> int:
    if chunk & (chunk - 1):
        raise ValueError("give a power of two, such as 32 or 64")
    return chunk


# A chunk that can be halved down to one position.
PowerOfTwo = Annotated[int, AfterValidator(_require_power_of_two)]


def iter_halves(positions: int) -> Iterator[int]:
    """1, 2, 4, .. up to half of `positions`, a power of two."""
    half = 1
    while half < positions:
        yield half
        half *= 2


def split_halves(x: Tensor, half: int) -> tuple[Tensor, Tensor]:
    """First and second halves, [..., R / (2 half), half, C], of the pieces of x [..., R, C]: views."""
    first, second = x.unflatten(-2, (-1, 2, half)).unbind(-3)
    return first, second


def corners(pairs: Tensor, half: int) -> Tensor:
    """Of [..., R, R] those of each piece's second half with its first, [..., R / (2 half), half, half]: a view."""
    blocks = split_halves(pairs, half)[1].unflatten(-1, (-1, 2, half))[..., 0, :]
    view: Tensor = blocks.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)
    return view
