"""Mechanisms of the cases, and comparisons of their gradients and with their oracles."""

import importlib

import torch
from attention.inputs import Case, Inputs, Oracle
from tolerances import FLOAT64, assert_agree
from torch import Tensor

from linformer_cli.attention.base import Attention, AttentionShape
from linformer_cli.attention.catalogue import CATALOGUE
from linformer_cli.model.mixers import build_attention

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
    torch.default_generator.manual_seed(20)  # `torch.manual_seed` also formats the stack, once per kind of device
    mechanism = build_attention(case.attention, case.options, shape).double()
    if case.prepare:
        case.prepare(mechanism)
    return mechanism.to(dtype).eval()


def assert_gradients_agree(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert_agree(found[name], gradient, FLOAT64)


def run_oracle(case: Case, mechanism: Attention, inputs: Inputs, oracle: Oracle | None = None) -> Tensor:
    """Return the result of `oracle` (default: that of the causal form)."""
    return (oracle or case.oracle)(inputs, dict(mechanism.named_parameters()) | dict(mechanism.named_buffers()))
