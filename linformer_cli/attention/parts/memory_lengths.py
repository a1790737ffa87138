"""Memory lengths: in how many positions a state decays to 1/e."""

import math

import torch
from torch import Tensor

from linformer_cli.attention.base import AttentionOptions, AttentionShape, setting


def log_memories(shape: AttentionShape, count: int, least: int = 1) -> Tensor:
    """Return logarithms of `count` memory lengths, at least `least`, evenly spaced from an image down to a row."""
    longest, shortest = (math.log(max(least, memory)) for memory in (shape.positions, shape.row))
    return torch.linspace(longest, shortest, count)


def of_heads(parameter: Tensor, dtype: torch.dtype, axes: int) -> Tensor:
    """Return a parameter [H] in `dtype`, broadcast over a tensor [B, H, ..] with this number of axes."""
    return parameter.to(dtype).view(-1, *[1] * (axes - 2))


def inverse_softplus(y: Tensor) -> Tensor:
    """Return x with softplus(x) = y, for y > 0."""
    return y.expm1().log()


class FadingOptions(AttentionOptions):
    shortest_memory: float | None = setting(
        None,
        "shortest memory length: positions until a weight falls to 1/e (default: one row, but at most longest_memory)",
        ge=1,
    )
    longest_memory: float | None = setting(
        None,
        "longest memory length: positions until a weight falls to 1/e (default: one image, but at "
        "least shortest_memory; with a single decay, shortest_memory if given)",
        ge=1,
    )
    output_gate: bool = setting(True, "multiply every output by a gate computed from the input")

    def check(self) -> None:
        if self.shortest_memory and self.longest_memory and self.shortest_memory > self.longest_memory:
            found = f"{self.shortest_memory:g} and {self.longest_memory:g}"
            raise ValueError(f"the shortest memory must not be longer than the longest, found {found}")

    def memory_lengths(self, shape: AttentionShape, count: int) -> list[float]:
        """Return `count` lengths, spaced geometrically from the longest down; a buffer would be rounded in bfloat16."""
        # A given length bounds the default of the other. With a single decay, there is only one length.
        if count == 1 and self.shortest_memory and not self.longest_memory:
            return [self.shortest_memory]
        longest = self.longest_memory or max(shape.positions, self.shortest_memory or 0)
        shortest = self.shortest_memory or min(shape.row, longest)
        return [longest * (shortest / longest) ** (place / max(1, count - 1)) for place in range(count)]
