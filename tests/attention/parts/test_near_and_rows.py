"""Compares the softmax over near keys and rows with its definition, when computed in one group or in several."""

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from attention.measures import measure_saved_bytes
from loops import loop_over
from tolerances import FLOAT64, all_finite, assert_agree, assert_all_agree
from torch import Tensor

from linformer_cli.attention.parts import near_and_rows
from linformer_cli.attention.parts.near_and_rows import Pattern, attend_near_and_rows

PATTERNS = {
    "blocks": Pattern(first=0, span=8, rank=3, window=8, before=0, missing=0, block=8),
    "behind others": Pattern(first=16, span=8, rank=3, window=8, before=0, missing=0, block=8),
    "window": Pattern(first=0, span=5, rank=1, window=12, before=11, missing=11, block=8),
    "window behind others": Pattern(first=7, span=5, rank=2, window=12, before=11, missing=4, block=8),
    "window over many blocks": Pattern(first=3, span=4, rank=1, window=30, before=29, missing=26, block=4),
    "window of one": Pattern(first=0, span=4, rank=1, window=1, before=0, missing=0, block=8),
}
every_pattern = pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
LENGTH = 48


def draw(pattern: Pattern, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Draw q, near keys and values, and row keys and values. There are fewer rows than the last queries could see."""
    generator = torch.Generator().manual_seed(0)
    near, rows = pattern.before + LENGTH, (pattern.first + LENGTH) // pattern.span * pattern.rank - 1
    sizes = ((LENGTH, 6), (near, 6), (near, 5), (rows, 6), (rows, 5))
    return [
        torch.randn(2, 3, *size, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for size in sizes
    ]


def define(q: Tensor, near_k: Tensor, near_v: Tensor, row_k: Tensor, row_v: Tensor, pattern: Pattern) -> Tensor:
    place = torch.arange(LENGTH)[:, None]
    near = torch.arange(near_k.shape[2])
    newest = place + pattern.before
    near_seen = (near <= newest) & (near > newest - pattern.window) & (near >= pattern.missing)
    if not pattern.before:  # near keys are those of the query's own block
        near_seen &= near // pattern.block == place // pattern.block
    rows_seen = torch.arange(row_k.shape[2]) < (pattern.first + place) // pattern.span * pattern.rank
    scores = q @ torch.cat([near_k, row_k], dim=2).transpose(-1, -2)
    hidden = ~torch.cat([near_seen, rows_seen], dim=1)
    return scores.masked_fill(hidden, -math.inf).softmax(dim=-1) @ torch.cat([near_v, row_v], dim=2)


def attend(inputs: list[Tensor], pattern: Pattern) -> Tensor:
    q, near_k, near_v, row_k, row_v = inputs
    return attend_near_and_rows(q, (near_k, near_v), (row_k, row_v), pattern)


def gradients(run: Callable[[], Tensor], inputs: list[Tensor]) -> tuple[Tensor, ...]:
    y = run()
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(y.dtype)
    return torch.autograd.grad((y * weights).sum(), inputs)


@every_pattern
@loop_over("group_scores", [1, 2000, 5000, 2**20])
def test_groups_of_any_size_match_the_definition(pattern: Pattern, group_scores: int, monkeypatch) -> None:
    monkeypatch.setattr(near_and_rows, "GROUP_SCORES", group_scores)
    inputs = draw(pattern)
    assert_agree(attend(inputs, pattern), define(*inputs, pattern), FLOAT64)
    found = gradients(lambda: attend(inputs, pattern), inputs)
    expected = gradients(lambda: define(*inputs, pattern), inputs)
    assert_all_agree(found, expected, FLOAT64)


def test_the_tested_sizes_give_one_and_several_groups() -> None:
    """Otherwise, the test above might cover only one group or only several groups."""
    pattern = PATTERNS["window behind others"]
    inputs = draw(pattern)
    counts = []
    with pytest.MonkeyPatch.context() as patch:
        for group_scores in (1, 2000, 5000, 2**20):
            patch.setattr(near_and_rows, "GROUP_SCORES", group_scores)
            groups = near_and_rows.iter_groups(pattern, inputs[0].flatten(0, 1), inputs[3].shape[2])
            counts.append(sum(1 for _ in groups))
    assert counts[0] == LENGTH // pattern.block and counts[-1] == 1
    assert all(first >= second for first, second in itertools.pairwise(counts)) and len(set(counts)) > 2


def test_without_rows_only_the_window_is_seen() -> None:
    pattern = PATTERNS["window"]
    *near, row_k, row_v = draw(pattern)
    inputs = [*near, row_k[:, :, :0], row_v[:, :, :0]]
    assert_agree(attend(inputs, pattern), define(*inputs, pattern), FLOAT64)


@every_pattern
def test_large_scores_give_finite_results(pattern: Pattern, monkeypatch: pytest.MonkeyPatch) -> None:
    """Masked scores are far above the visible ones. Both the forward and the backward pass are tested."""
    monkeypatch.setattr(near_and_rows, "GROUP_SCORES", 2000)
    inputs = draw(pattern, torch.float32)
    with torch.no_grad():
        for part in (inputs[1], inputs[3]):
            part[:, :, 1::2] *= 1e4
    assert_agree(attend(inputs, pattern), define(*inputs, pattern), 1e-5)
    assert all_finite(gradients(lambda: attend(inputs, pattern), inputs))


def test_autocast_does_not_change_the_backward_pass() -> None:
    pattern = PATTERNS["window"]
    inputs = draw(pattern, torch.float32)
    y = attend(inputs, pattern)
    expected = torch.autograd.grad(y.sum(), inputs, retain_graph=True)
    with torch.autocast("cpu", torch.bfloat16):
        found = torch.autograd.grad(y.sum(), inputs)
    for gradient, other in zip(found, expected, strict=True):
        assert gradient.dtype == torch.float32
        assert torch.equal(gradient, other)


@every_pattern
def test_no_score_is_saved_for_the_backward_pass(pattern: Pattern) -> None:
    inputs = draw(pattern)
    y = attend(inputs, pattern)
    # The inputs, the output and one number per query are saved.
    expected = sum(part.nbytes for part in inputs) + y.nbytes + y[..., 0].numel() * y.element_size()
    assert measure_saved_bytes(attend, inputs, pattern) == expected
