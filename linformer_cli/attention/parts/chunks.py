"""Sequences cut into chunks of the same length."""

from torch import Tensor
from torch.nn import functional


def cut_chunks(x: Tensor, chunk: int, value: float = 0.0) -> Tensor:
    """x [..., T, W] as [..., chunks, chunk, W], with `value` after the last position. Copies only if needed."""
    fill = -x.shape[-2] % chunk
    chunks: Tensor = (functional.pad(x, (0, 0, 0, fill), value=value) if fill else x).unflatten(-2, (-1, chunk))
    return chunks
