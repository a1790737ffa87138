"""Compares chunked causal sums with a plain double sum, and tests the division by the total weight."""

import contextlib
from collections.abc import Iterator

import pytest
import torch
from loops import loop_over
from tolerances import FLOAT64, assert_agree
from torch import Tensor

from linformer_cli.attention.parts.sums import causal_sums, divide_by_weight
from linformer_cli.native.library import reference_only


@pytest.fixture(autouse=True, params=["compiled", "plain torch"])
def form(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every test runs with the compiled form, if there is one, and with plain torch."""
    with reference_only() if request.param == "plain torch" else contextlib.nullcontext():
        yield


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def plain_sums(phi_q: Tensor, phi_k: Tensor, v: Tensor, carried: Tensor) -> tuple[Tensor, Tensor]:
    outputs, total = [], carried
    for t in range(v.shape[2]):
        total = total + phi_k[:, :, t, :, None] * v[:, :, t, None, :]
        outputs.append((phi_q[:, :, t, :, None] * total).sum(dim=2))
    return torch.stack(outputs, dim=2), total


@loop_over("chunk", [1, 3, 16, 64, 1000])
@loop_over("length", [1, 2, 15, 16, 17, 50])
@loop_over("carry", [False, True])
def test_chunked_sums_equal_the_plain_sum(length: int, chunk: int, carry: bool) -> None:
    phi_q, phi_k, v = draw(2, 3, length, 7), draw(2, 3, length, 7, seed=1), draw(2, 3, length, 4, seed=2)
    carried = draw(2, 3, 7, 4, seed=3) if carry else torch.zeros(2, 3, 7, 4, dtype=torch.float64)
    y, total = causal_sums(phi_q, phi_k, v, carried if carry else None, chunk)
    expected_y, expected_total = plain_sums(phi_q, phi_k, v, carried)
    assert_agree(y, expected_y, FLOAT64)
    assert_agree(total, expected_total, FLOAT64)


@loop_over(("length", "chunk"), [(5, 8), (8, 4), (11, 4)])
def test_gradients_reach_all_inputs(length: int, chunk: int) -> None:
    inputs = [draw(1, 2, length, 3), draw(1, 2, length, 3, seed=1), draw(1, 2, length, 2, seed=2), draw(1, 2, 3, 2)]
    leaves = [part.requires_grad_() for part in inputs]
    assert torch.autograd.gradcheck(lambda *parts: causal_sums(*parts, chunk), leaves)


def test_carried_sums_are_not_modified() -> None:
    carried = draw(1, 1, 3, 2)
    before = carried.clone()
    causal_sums(draw(1, 1, 9, 3), draw(1, 1, 9, 3), draw(1, 1, 9, 2), carried, 4)
    assert torch.equal(carried, before)


def test_division_by_a_weight_of_zero_gives_zero() -> None:
    numerator = draw(2, 3, 4).requires_grad_()
    weight = torch.tensor([[2.0, 0.0, -0.5], [0.0, 1e-300, 1.0]], dtype=torch.float64, requires_grad=True)
    y = divide_by_weight(numerator, weight)
    nothing = weight == 0
    assert torch.equal(y[nothing], torch.zeros(2, 4, dtype=torch.float64))
    assert torch.equal(y[~nothing], (numerator / weight.unsqueeze(-1))[~nothing])
    # A weight of 1e-300 is treated like any other and has a large gradient. Weights of 0 have no gradient.
    y[:, :2].sum().backward()
    assert numerator.grad is not None and weight.grad is not None
    assert not numerator.grad[nothing].any()
    assert not weight.grad[nothing].any()
    assert bool(torch.isfinite(numerator.grad).all())
