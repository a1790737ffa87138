"""The cases of the contract tests: a mechanism with small options and its oracle."""

from collections.abc import Callable, Container, Mapping
from typing import Any, Literal, NamedTuple

import pytest
from torch import Tensor, nn

from linformer_cli.evaluation.contract import Inputs

Tensors = Mapping[str, Tensor]


Oracle = Callable[[Inputs, Tensors], Tensor]


class Case(NamedTuple):
    """A mechanism with options so small that 130 positions cross at least three boundaries between chunks or blocks.

    `oracle` gets the inputs, and all parameters and buffers by name. `condition` [B, H, T] measures cancellation in the
    denominator; only mechanisms whose denominator can cancel have it. `heads` is 2 for every mechanism with heads.
    `sees_itself` is false if a position ignores its own value whenever it sees other positions. `prepare` sets
    parameters whose initial value, such as 0, would hide a mistake. If `steady_steps` is true, the work of a step must
    not grow even if the state grows. `oracle_all` is the oracle of the bidirectional form.

    `keeps_pairs` says when training may save a number for every pair of positions. The contract tests fail if this
    exemption is not needed.
    """

    attention: str
    options: dict[str, Any]
    oracle: Oracle
    condition: Callable[[Inputs], Tensor] | None = None
    heads: int = 2
    sees_itself: bool = True
    prepare: Callable[[nn.Module], None] | None = None
    keeps_pairs: Literal["never", "after a prefix", "always"] = "never"
    steady_steps: bool = False
    oracle_all: Oracle | None = None


def mark_variants(
    values: Mapping[str, Any], attention: Callable[[Any], str], fast: Container[str] | None = None
) -> list[Any]:
    """Parameters with their keys as ids.

    `attention` names a value's mechanism, of which only the first is not slow. If `fast` is given, only these
    mechanisms are not slow.
    """
    seen: set[str] = set()
    parameters = []
    for key, value in values.items():
        other = fast is not None and attention(value) not in fast
        marks = pytest.mark.slow if other or attention(value) in seen else ()
        parameters.append(pytest.param(value, id=key, marks=marks))
        seen.add(attention(value))
    return parameters
