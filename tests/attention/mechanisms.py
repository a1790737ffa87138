"""Mechanisms of the cases with random inputs, and gradients of their outputs."""

import importlib
from collections.abc import Callable
from typing import Any

import torch
from attention.inputs import Case, Inputs, Oracle
from tolerances import FLOAT64, assert_agree
from torch import Tensor

from linformer_cli.attention.base import Attention, AttentionShape
from linformer_cli.attention.catalogue import CATALOGUE
from linformer_cli.model.mixers import build_attention

LENGTH = 130


# Every mechanism has a file of cases with its name.
CASES: dict[str, Case] = {
    key: case for name in CATALOGUE for key, case in importlib.import_module(f"attention.cases.{name}").CASES.items()
}


def build(
    case: Case,
    dtype: torch.dtype = torch.float64,
    key_width: int = 6,
    value_width: int = 5,
    positions: int = 784,
    row: int = 28,
) -> Attention:
    if CATALOGUE[case.attention].shared_key_value:
        value_width = key_width
    shape = AttentionShape(case.heads, key_width, value_width, positions, row)
    torch.manual_seed(20)
    mechanism = build_attention(case.attention, case.options, shape).double()
    if case.prepare:
        case.prepare(mechanism)
    return mechanism.to(dtype).eval()


def draw(
    mechanism: Attention, length: int = LENGTH, batch: int = 2, seed: int = 0, dtype: Any = torch.float64
) -> Inputs:
    """Draw random inputs in float64, so that all types start from the same numbers."""
    generator = torch.Generator().manual_seed(seed)
    shape, extra = mechanism.shape, mechanism.extra_per_head
    widths = (shape.key_width, shape.key_width, shape.value_width, extra)
    parts = [
        torch.randn(batch, shape.heads, length, width, generator=generator, dtype=torch.float64).to(dtype)
        for width in widths
    ]
    return share(mechanism, Inputs(*parts[:3], parts[3] if extra else None))


def share(mechanism: Attention, inputs: Inputs) -> Inputs:
    if mechanism.shared_key_value:
        return inputs._replace(v=inputs.k)
    return inputs._replace(q=inputs.k) if mechanism.shared_query_key else inputs


def gradients(mechanism: Attention, inputs: Inputs, run: Callable[[Inputs], Tensor]) -> dict[str, Tensor]:
    """Differentiate a random weighted sum of the outputs with respect to the inputs and all parameters, by name."""
    leaves = share(mechanism, inputs.map(lambda part: part.detach().clone().requires_grad_()))
    y = run(leaves)
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(y.dtype)
    wanted = {name: part for name, part in leaves._asdict().items() if part is not None}
    if mechanism.shared_query_key:
        del wanted["q"]
    if mechanism.shared_key_value:
        del wanted["k"]
    wanted |= dict(mechanism.named_parameters())
    found = torch.autograd.grad((y * weights).sum(), list(wanted.values()), materialize_grads=True)
    return dict(zip(wanted, found, strict=True))


def assert_gradients_agree(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert_agree(found[name], gradient, FLOAT64)


def run_oracle(case: Case, mechanism: Attention, inputs: Inputs, oracle: Oracle | None = None) -> Tensor:
    """Return the result of `oracle` (default: that of the causal form)."""
    return (oracle or case.oracle)(inputs, dict(mechanism.named_parameters()) | dict(mechanism.named_buffers()))
