"""The parts of a contract case: random inputs, and a mechanism with small options and its oracle."""

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn

Tensors = Mapping[str, Tensor]


class Inputs(NamedTuple):
    """q, k [B, H, T, K], v [B, H, T, V] and, for mechanisms that need it, extra [B, H, T, E]."""

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

    `oracle` gets the inputs, and all parameters and buffers by name. `condition` [B, H, T] is the cancellation in the
    denominator, for mechanisms where it can cancel. `heads` is 2 for every mechanism with heads. `sees_itself` is
    false if a position attends only to other positions where there are any, so its own value need not matter.
    `prepare` sets parameters whose initial value, such as 0, would hide a mistake.

    Exemptions, which the contract tests require to be needed: `keeps_pairs`, if training keeps a number for every pair
    of positions; `autocast_rounds`, the executions whose scores autocast computes in bfloat16, even for float32 inputs.
    `steady_steps` requires more than a growing state does: the work of a step must not grow.
    """

    attention: str
    options: dict[str, Any]
    oracle: Callable[[Inputs, Tensors], Tensor]
    condition: Callable[[Inputs], Tensor] | None = None
    heads: int = 2
    sees_itself: bool = True
    prepare: Callable[[nn.Module], None] | None = None
    keeps_pairs: Literal["never", "after a prefix", "always"] = "never"
    steady_steps: bool = False
    autocast_rounds: tuple[str, ...] = ()
