"""One mechanism with random arguments, for the tests that are particular to it."""

from typing import Any

import torch
from torch import Tensor

from linformer_cli.attention.base import Attention, AttentionShape
from linformer_cli.evaluation import contract
from linformer_cli.evaluation.contract import Inputs
from linformer_cli.model.mixers import build_attention


def build_one(
    name: str,
    dtype: torch.dtype = torch.float64,
    *,
    heads: int = 2,
    key_width: int = 6,
    value_width: int = 5,
    positions: int = 784,
    row: int = 28,
    layer: int = 0,
    **options: Any,
) -> Any:
    """A mechanism with the given options. Its parameters are always drawn from the same seed."""
    torch.manual_seed(2)
    return build_attention(name, options, AttentionShape(heads, key_width, value_width, positions, row, layer)).to(
        dtype
    )


def draw_parts(
    length: int,
    dtype: torch.dtype = torch.float64,
    *,
    widths: tuple[int, ...] = (6, 6, 5),
    batch: int = 2,
    heads: int = 2,
    seed: int = 0,
) -> list[Any]:
    """Random arguments of `attend` [B, H, T, width]: q, k, v and, with a fourth width, no state and the extra scalars.

    They are drawn in float64, so that all types start from the same numbers.
    """
    generator = torch.Generator().manual_seed(seed)
    q, k, v, *extra = (
        torch.randn(batch, heads, length, width, generator=generator, dtype=torch.float64).to(dtype) for width in widths
    )
    return [q, k, v, None, *extra] if extra else [q, k, v]


def draw_for(attention: Attention, length: int = 40, dtype: torch.dtype = torch.float64) -> list[Any]:
    """`draw_parts` with the heads and widths of `attention`, which needs extra scalars."""
    shape = attention.shape
    widths = (shape.key_width, shape.key_width, shape.value_width, attention.extra_per_head)
    return draw_parts(length, dtype, widths=widths, heads=shape.heads)


def step_through(attention: Attention, inputs: Any, state: Any = None, start: int = 0) -> tuple[Tensor, Any]:
    """Take a step for every position of the inputs from `start` on. Returns all outputs and the last state.

    The inputs are `Inputs`, or arguments of `attend`, whose state is not used.
    """
    if not isinstance(inputs, Inputs):
        inputs = Inputs(*inputs[:3], inputs[4] if len(inputs) > 3 else None)
    return contract.step_through(attention, inputs.block(start), state)
