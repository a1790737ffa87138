"""Tests of dropout in one pass and of the norm of its sum. Masks may depend only on the seed."""

import math

import pytest
import torch
from loops import loop_over
from machine import needs_library, use_threads
from tolerances import BFLOAT16, assert_agree
from torch import Tensor, nn

from linformer_cli.model.dropout import Rounded, add_and_normalise, add_dropped, exact

COUNT = 300_000  # fills many blocks of the kernel, the last only partly


def drop(probability: float, seed: int, dtype: torch.dtype = torch.float32, count: int = COUNT) -> Tensor:
    """Return ones after dropout."""
    torch.manual_seed(seed)
    return add_dropped(torch.zeros(count), torch.ones(count, dtype=dtype), probability)


@loop_over("dtype", [torch.float32, torch.bfloat16])
@loop_over("probability", [0.1, 0.5, 0.9])
def test_elements_are_dropped_with_the_given_probability_or_scaled(form, probability: float, dtype) -> None:
    left = drop(probability, 0, dtype)
    kept = left != 0
    torch.testing.assert_close(left[kept], torch.full_like(left[kept], 1 / (1 - probability)), rtol=4e-3, atol=0)
    deviation = math.sqrt(probability * (1 - probability))
    assert abs(kept.double().mean() - (1 - probability)) < 4 * deviation / math.sqrt(COUNT)
    # Elements are uncorrelated at distances from one element to one image (784 x 256 elements).
    centred = kept.double() - (1 - probability)
    for apart in (1, 2, 16, 256, 4096, 784 * 256):
        correlation = (centred[apart:] * centred[:-apart]).mean() / deviation**2
        assert abs(correlation) < 4 / math.sqrt(COUNT - apart), apart


def test_the_mask_depends_on_the_random_state(form) -> None:
    assert torch.equal(drop(0.5, 1), drop(0.5, 1))
    first = drop(0.5, 1)
    assert abs(torch.eq(first, drop(0.5, 2)).double().mean() - 0.5) < 0.01
    torch.manual_seed(1)
    calls = [add_dropped(torch.zeros(COUNT), torch.ones(COUNT), 0.5) for _ in range(2)]
    assert abs(torch.eq(*calls).double().mean() - 0.5) < 0.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_use_the_mask_of_the_forward_pass(form, dtype) -> None:
    x = torch.randn(70, 33, generator=torch.Generator().manual_seed(0)).requires_grad_()
    branch = torch.randn(33, 70, generator=torch.Generator().manual_seed(1)).to(dtype).T.requires_grad_()
    torch.manual_seed(3)
    total = add_dropped(x, branch, 0.25)
    weights = torch.randn(33, 70, generator=torch.Generator().manual_seed(2)).T
    of_x, of_branch = torch.autograd.grad(total, [x, branch], weights)
    assert torch.equal(of_x, weights) and of_branch.dtype == dtype
    kept = (total - x).detach() != 0
    assert 0.6 < kept.double().mean() < 0.9
    tolerance = {"rtol": 1e-2, "atol": 1e-6} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close((total - x).detach(), (branch * kept / 0.75).float().detach(), **tolerance)
    torch.testing.assert_close(of_branch.float(), weights * kept / 0.75, **tolerance)


@needs_library
def test_the_result_does_not_depend_on_threads() -> None:
    expected = drop(0.3, 5)
    for count in (1, 2, 5):
        with use_threads(count):
            assert torch.equal(drop(0.3, 5), expected)


def normalise_sum(
    width: int, dtype: torch.dtype, probability: float, used: tuple[bool, bool] = (True, True)
) -> tuple[list[Tensor], list[Tensor]]:
    """Return outputs and gradients of `add_and_normalise` and of its definition, in this order.

    `used` tells whether the gradient flows through the result and through its rounded copy.
    """
    draw = torch.Generator().manual_seed(0)
    length = 2**16 // width
    x, of_y, of_copy = (torch.randn(3, length, width, generator=draw) for _ in range(3))
    branch = torch.randn(3, width, length, generator=draw).to(dtype).transpose(1, 2)
    norm = nn.LayerNorm(width, eps=1e-3)
    for parameter in norm.parameters():
        parameter.data = torch.randn(width, generator=draw)
    results = []
    for fused in (True, False):
        leaves = [x.clone().requires_grad_(), branch.detach().requires_grad_(), *norm.parameters()]
        torch.manual_seed(4)
        if fused:
            result = add_and_normalise(leaves[0], leaves[1], probability, norm)
            y, copy = exact(result), result.copy if isinstance(result, Rounded) else exact(result).to(dtype)
        else:
            y = norm(add_dropped(leaves[0], leaves[1], probability))
            copy = y.to(dtype)
        loss = used[0] * (y * of_y).sum() + used[1] * (copy.float() * of_copy).sum()
        results.append([y.detach(), copy.detach().float(), *torch.autograd.grad(loss, leaves)])
    return results[0], results[1]


@loop_over("width", [7, 256, 5000])
@loop_over("dtype", [torch.float32, torch.bfloat16])
@loop_over("probability", [0.0, 0.3])
def test_a_normalised_sum_and_its_gradients_are_those_of_its_parts(form, width: int, dtype, probability: float) -> None:
    found, expected = normalise_sum(width, dtype, probability)
    for index, (one, other) in enumerate(zip(found, expected, strict=True)):
        in_half = dtype == torch.bfloat16 and index in (1, 3)  # the rounded copy and the gradient of the branch
        assert_agree(one.float(), other.float(), BFLOAT16 if in_half else 1e-4)
        assert one.dtype == other.dtype


@pytest.mark.parametrize("used", [(True, False), (False, True)])
def test_a_normalised_sum_may_be_used_in_one_form_only(form, used: tuple[bool, bool]) -> None:
    found, expected = normalise_sum(33, torch.bfloat16, 0.3, used)
    for one, other in zip(found, expected, strict=True):
        assert_agree(one.float(), other.float(), BFLOAT16)


@needs_library
def test_a_bfloat16_branch_leaves_a_rounded_copy() -> None:
    x, norm = torch.randn(4, 8), nn.LayerNorm(8)
    y = add_and_normalise(x, torch.randn(4, 8).bfloat16(), 0.1, norm)
    assert isinstance(y, Rounded) and y.copy.dtype == torch.bfloat16 and torch.equal(y.copy, y.exact.bfloat16())
    assert isinstance(add_and_normalise(x, torch.randn(4, 8), 0.1, norm), Tensor)


@needs_library
def test_gradients_of_a_norm_do_not_depend_on_threads() -> None:
    expected = normalise_sum(256, torch.bfloat16, 0.3)[0]
    for count in (2, 5):
        with use_threads(count):
            assert all(map(torch.equal, normalise_sum(256, torch.bfloat16, 0.3)[0], expected))


def test_float64_uses_torchs_dropout() -> None:
    torch.manual_seed(0)
    total = add_dropped(torch.zeros(1000).double(), torch.ones(1000).double(), 0.5)
    torch.manual_seed(0)
    assert torch.equal(total, torch.nn.functional.dropout(torch.ones(1000).double(), 0.5))
