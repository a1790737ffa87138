"""What retention and gated linear attention have in common: how long is remembered, and how outputs are scaled."""

from typing import Annotated, Self

from pydantic import Field, model_validator
from torch import Tensor
from torch.nn import functional

from linformer_cli.attention.base import AttentionOptions, AttentionShape

# Far below any sum that says something; it keeps a sum of nothing at nothing.
_EPSILON = 1e-6


class FadingOptions(AttentionOptions):
    """Options of sums that fade and of what is made of them."""

    shortest_memory: Annotated[
        float | None,
        Field(
            ge=1,
            description="positions after which the first to forget keeps 1/e (default: a row, at most the longest)",
        ),
    ] = None
    longest_memory: Annotated[
        float | None,
        Field(
            ge=1,
            description="positions after which the last to forget keeps 1/e (default: an image, at least the shortest; "
            "of one head the shortest)",
        ),
    ] = None
    output_gate: Annotated[bool, Field(description="every output is scaled by a gate learned from the input")] = True

    @model_validator(mode="after")
    def _memories_in_order(self) -> Self:
        if self.shortest_memory and self.longest_memory and self.shortest_memory > self.longest_memory:
            found = f"{self.shortest_memory:g} and {self.longest_memory:g}"
            raise ValueError(f"the shortest memory must not be longer than the longest, found {found}")
        return self

    def memory_lengths(self, shape: AttentionShape, count: int) -> list[float]:
        """`count` lengths in positions: from the longest down, each in the same ratio to the next.

        Numbers, and what is made of them stays numbers until it is used: a buffer would be rounded when the model is
        cast to bfloat16, and one of float64 could not be moved to every device.
        """
        # A default gives way to what is given, so that the two stay in order, and where there is one length for both.
        if count == 1 and self.shortest_memory and not self.longest_memory:
            return [self.shortest_memory]
        longest = self.longest_memory or max(shape.positions, self.shortest_memory or 0)
        shortest = self.shortest_memory or min(shape.row, longest)
        return [longest * (shortest / longest) ** (place / max(1, count - 1)) for place in range(count)]


def scale_outputs(sums: Tensor, output_gate: Tensor | None) -> Tensor:
    """Sums [..., V] divided by their root mean square, times SiLU of `output_gate` [..., V] where there is one.

    It stands in for a denominator where queries and keys have signs, so that their weights add up to anything.
    """
    y = functional.rms_norm(sums, sums.shape[-1:], eps=_EPSILON)
    return y if output_gate is None else y * functional.silu(output_gate.to(y.dtype))
