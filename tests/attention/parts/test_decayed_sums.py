"""Compares decaying causal sums with a recurrence over single positions."""

import contextlib
from collections.abc import Callable, Iterator

import pytest
import torch
from attention.measures import measure_saved_bytes
from loops import loop_over
from tolerances import FLOAT64, assert_all_agree
from torch import Tensor

from linformer_cli.attention.parts.sums import (
    decayed_causal_sums,
    featurewise_decayed_causal_sums,
    scan_with_decay,
)
from linformer_cli.native.library import reference_only

Sums = Callable[..., tuple[Tensor, Tensor]]


@pytest.fixture(autouse=True, params=["compiled", "plain torch"])
def form(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every test runs with the compiled form, if there is one, and with plain torch."""
    with reference_only() if request.param == "plain torch" else contextlib.nullcontext():
        yield


def draw(length: int, sums: Sums = decayed_causal_sums, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q, k, v, carried = (
        torch.randn(2, 3, *shape, generator=generator, dtype=torch.float64)
        for shape in ((length, 4), (length, 4), (length, 5), (4, 5))
    )
    width = (4,) if sums is featurewise_decayed_causal_sums else ()
    log_decay = -torch.rand(2, 3, length, *width, generator=generator, dtype=torch.float64)
    return q, k, v, log_decay, carried


def by_recurrence(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    outputs = []
    if log_decay.dim() == 3:
        log_decay = log_decay.unsqueeze(-1)
    for t in range(q.shape[2]):
        s = log_decay[:, :, t, :, None].exp() * s + k[:, :, t, :, None] * v[:, :, t, None]
        outputs.append((q[:, :, t, None] @ s).squeeze(2))
    return torch.stack(outputs, dim=2), s


CHUNKS = {decayed_causal_sums: [1, 4, 7, 30, 31, 1000], featurewise_decayed_causal_sums: [1, 2, 4, 16, 32, 1024]}


@loop_over(("sums", "chunk"), [(sums, chunk) for sums, chunks in CHUNKS.items() for chunk in chunks])
@loop_over("carries", [False, True])
def test_outputs_and_gradients_match_the_recurrence(sums: Sums, chunk: int, carries: bool) -> None:
    leaves = [part.requires_grad_() for part in draw(30, sums)]
    q, k, v, log_decay, carried = leaves
    start = carried if carries else 0 * carried
    results = (
        sums(q, k, v, log_decay, carried if carries else None, chunk),
        by_recurrence(q, k, v, log_decay, start),
    )
    gradients = []
    for y, s in results:
        weighted = (y * y.detach().cos()).sum() + (s * s.detach().sin()).sum()
        gradients.append(torch.autograd.grad(weighted, leaves, materialize_grads=True))
    assert_all_agree(*results, FLOAT64)
    assert_all_agree(*gradients, FLOAT64)


def test_featurewise_decay_saves_nothing_per_pair() -> None:
    """With chunks of 64, one number per pair of positions and feature would mean 64 x 32 numbers per position."""
    q, k, v, log_decay = (torch.rand(1, 1, 1024, 32).requires_grad_() for _ in range(4))
    kept = measure_saved_bytes(featurewise_decayed_causal_sums, q, k, v, -log_decay, None, 64)
    assert kept < 1024 * 4 * 12 * 32


@pytest.mark.parametrize("shape", [(2, 5, 3, 1), (2, 5, 1, 1)])
def test_gradients_of_the_scan_match_finite_differences(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    parts, decay, first = (
        torch.rand(size, generator=generator, dtype=torch.float64).requires_grad_()
        for size in ((2, 5, 3, 4), shape, (2, 3, 4))
    )
    assert torch.autograd.gradcheck(scan_with_decay, (parts, decay, first))
    assert torch.autograd.gradcheck(lambda x, y: scan_with_decay(x, decay.detach(), y), (parts, first))
