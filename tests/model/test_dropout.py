"""Tests of dropout in one pass: its rate, scale and gradient. The mask may depend only on the seed."""

import math

import pytest
import torch
from machine import HAS_LIBRARY, NO_LIBRARY
from torch import Tensor

from linformer_cli.model.dropout import add_dropped

COUNT = 300_000  # fills many blocks of the kernel, the last only partly


def drop(probability: float, seed: int, dtype: torch.dtype = torch.float32, count: int = COUNT) -> Tensor:
    """Return ones after dropout."""
    torch.manual_seed(seed)
    return add_dropped(torch.zeros(count), torch.ones(count, dtype=dtype), probability)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("probability", [0.1, 0.5, 0.9])
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


@pytest.mark.skipif(not HAS_LIBRARY, reason=NO_LIBRARY)
def test_the_result_does_not_depend_on_threads() -> None:
    threads = torch.get_num_threads()
    expected = drop(0.3, 5)
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            assert torch.equal(drop(0.3, 5), expected)
    finally:
        torch.set_num_threads(threads)


def test_float64_uses_torchs_dropout() -> None:
    torch.manual_seed(0)
    total = add_dropped(torch.zeros(1000).double(), torch.ones(1000).double(), 0.5)
    torch.manual_seed(0)
    assert torch.equal(total, torch.nn.functional.dropout(torch.ones(1000).double(), 0.5))
