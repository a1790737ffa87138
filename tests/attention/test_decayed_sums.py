"""Fading causal sums against their recurrence, position by position."""

import pytest
import torch
from tolerances import FLOAT64, assert_agree
from torch import Tensor

from linformer_cli.attention.base import state_tensors
from linformer_cli.attention.decayed_sums import decayed_causal_sums, scan_with_decay


def draw(length: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q, k, v, carried = (
        torch.randn(2, 3, *shape, generator=generator, dtype=torch.float64)
        for shape in ((length, 4), (length, 4), (length, 5), (4, 5))
    )
    log_decay = -torch.rand(2, 3, length, generator=generator, dtype=torch.float64)
    return q, k, v, log_decay, carried


def by_recurrence(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    outputs = []
    for t in range(q.shape[2]):
        s = log_decay[:, :, t, None, None].exp() * s + k[:, :, t, :, None] * v[:, :, t, None]
        outputs.append((q[:, :, t, None] @ s).squeeze(2))
    return torch.stack(outputs, dim=2), s


@pytest.mark.parametrize("chunk", [1, 4, 7, 30, 31, 1000])
@pytest.mark.parametrize("carries", [False, True])
def test_outputs_and_gradients_are_those_of_the_recurrence(chunk: int, carries: bool) -> None:
    leaves = [part.requires_grad_() for part in draw(30)]
    q, k, v, log_decay, carried = leaves
    start = carried if carries else 0 * carried
    results = (
        decayed_causal_sums(q, k, v, log_decay, carried if carries else None, chunk),
        by_recurrence(q, k, v, log_decay, start),
    )
    gradients = []
    for y, s in results:
        weighted = (y * y.detach().cos()).sum() + (s * s.detach().sin()).sum()
        gradients.append(torch.autograd.grad(weighted, leaves, materialize_grads=True))
    for found, expected in zip(*results, strict=True):
        assert_agree(found, expected, FLOAT64)
    for found, expected in zip(*gradients, strict=True):
        assert_agree(found, expected, FLOAT64)


@pytest.mark.parametrize("drop", [50.0, 800.0, 1e5])
def test_a_decay_that_leaves_nothing_is_no_quotient_of_nothings(drop: float) -> None:
    q, k, v, log_decay, carried = draw(30)
    log_decay[:, :, ::5] = -drop
    leaves = [part.requires_grad_() for part in (q, k, v, log_decay, carried)]
    y, s = decayed_causal_sums(*leaves, chunk=8)
    expected, expected_s = by_recurrence(*leaves)
    assert_agree(y, expected, FLOAT64)
    assert_agree(s, expected_s, FLOAT64)
    for gradient in torch.autograd.grad(y.sum() + s.sum(), leaves):
        assert bool(torch.isfinite(gradient).all())


def test_the_last_sum_keeps_no_other_alive() -> None:
    _, s = decayed_causal_sums(*draw(30), chunk=4)
    for tensor in state_tensors(s):
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


@pytest.mark.parametrize("shape", [(2, 5, 3, 1), (2, 5, 1, 1)])
def test_the_scan_has_the_right_gradients(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    parts, decay, first = (
        torch.rand(size, generator=generator, dtype=torch.float64).requires_grad_()
        for size in ((2, 5, 3, 4), shape, (2, 3, 4))
    )
    assert torch.autograd.gradcheck(scan_with_decay, (parts, decay, first))
    assert torch.autograd.gradcheck(lambda x, y: scan_with_decay(x, decay.detach(), y), (parts, first))
