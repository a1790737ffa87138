"""What a case of the contract is made of: random inputs, and a mechanism with small options beside its definition."""

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn

Tensors = Mapping[str, Tensor]


class Inputs(NamedTuple):
    """q, k [B, H, T, K], v [B, H, T, V] and, for a mechanism that asks for it, extra [B, H, T, E]."""

    q: Tensor
    k: Tensor
    v: Tensor
    extra: Tensor | None = None

    def map(self, change: Callable[[Tensor], Tensor]) -> "Inputs":
        return Inputs(*(None if part is None else change(part) for part in self))

    def block(self, start: int, stop: int | None = None) -> "Inputs":
        return self.map(lambda part: part[:, :, start:stop])

    def leaves(self) -> list[Tensor]:
        return [part for part in self if part is not None]


class Case(NamedTuple):
    """A mechanism with options so small that 130 positions cross at least three of its boundaries.

    `oracle` gets the inputs and all parameters and buffers by name. `condition` [B, H, T] says how far a denominator
    cancels, for the mechanisms where it can. `heads` is 2 wherever a mechanism has heads at all. `sees_itself` is
    false where a position looks at others alone, if there are any, so that its own value need not show. `prepare` sets
    parameters that start where a mistake would not show, at 0 say.

    What a mechanism is allowed, and the contract sees that it needs: `keeps_pairs`, when training keeps a number for
    every pair of positions; `autocast_rounds`, the executions whose scores autocast takes in bfloat16, of float32
    inputs too. `steady_steps` says more than a growing state promises: the work of a step does not grow.
    """

    attention: str
    options: dict[str, Any]
    oracle: Callable[[Inputs, Tensors], Tensor]
    condition: Callable[[Inputs], Tensor] | None = None
    heads: int = 2
    sees_itself: bool = True
    prepare: Callable[[nn.Module], None] | None = None
    keeps_pairs: Literal["never", "behind a prefix", "always"] = "never"
    steady_steps: bool = False
    autocast_rounds: tuple[str, ...] = ()
