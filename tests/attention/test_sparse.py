"""Tests of sparse attention's patterns and groups of rows; test_contract.py covers what all mechanisms share."""

from typing import Any

import pytest
import torch
from attention.arguments import draw_parts
from attention.cases.sparse import fixed_parts, sparse, strided_parts
from attention.inputs import Inputs
from attention.measures import measure_saved_bytes
from tolerances import FLOAT64, assert_agree, assert_all_agree
from torch import Tensor

from linformer_cli.attention.base import AttentionShape
from linformer_cli.attention.parts import key_sets
from linformer_cli.attention.parts.spans import stack_spans
from linformer_cli.attention.sparse import SparseAttention, SparseOptions
from linformer_cli.errors import UsageError
from linformer_cli.model.mixers import build_attention, parse_options

LENGTH = 130


def build(heads_of_layer: int = 2, row: int = 28, **options: Any) -> SparseAttention:
    shape = AttentionShape(heads=heads_of_layer, key_width=6, value_width=5, positions=784, row=row)
    attention = build_attention("sparse", options, shape).double()
    return attention


def draw(length: int = LENGTH, heads: int = 2) -> Inputs:
    return Inputs(*draw_parts(length, heads=heads))


def seen_positions(attention: SparseAttention, place: int, head: int, way: str) -> list[int]:
    """Return the positions whose values reach the output at `place`; with one-hot values, outputs are weights."""
    q, k = draw(place + 1, attention.shape.heads)[:2]
    v = torch.eye(place + 1, dtype=torch.float64).expand(2, attention.shape.heads, -1, -1).contiguous()
    if way == "attend":
        weights = attention.attend(q, k, v)[0][0, head, place]
    else:
        _, state = attention.attend(q[:, :, :place], k[:, :, :place], v[:, :, :place])
        weights = attention.step(q[:, :, place], k[:, :, place], v[:, :, place], state)[0][0, head]
    return weights.nonzero().flatten().tolist()


@pytest.mark.parametrize("way", ["attend", "step"])
def test_patterns_show_the_expected_positions_with_rows_of_ten(way: str) -> None:
    row, column = list(range(48, 58)), [7, 17, 27, 37, 47]
    assert seen_positions(build(row=10), 57, 1, way) == sorted(row + column)
    assert seen_positions(build(row=10, heads="split"), 57, 0, way) == row
    assert seen_positions(build(row=10, heads="split"), 57, 1, way) == [*column, 57]
    block, summaries = list(range(50, 56)), [place for place in range(50) if place % 10 >= 7]
    fixed = {"row": 10, "pattern": "fixed", "summary": 3}
    assert seen_positions(build(**fixed), 55, 0, way) == sorted(block + summaries)
    assert seen_positions(build(**fixed, heads="split"), 55, 0, way) == block
    assert seen_positions(build(**fixed, heads="split"), 55, 1, way) == [*summaries, 55]
    assert seen_positions(build(**fixed, heads="split"), 58, 1, way) == [*summaries, 57, 58]


@pytest.mark.parametrize("pattern", ["strided", "fixed"])
@pytest.mark.parametrize("heads", ["merged", "split"])
@pytest.mark.parametrize("scores", [1, 600, 1500])
def test_recomputing_groups_of_rows_does_not_change_gradients(pattern, heads, scores, monkeypatch) -> None:
    attention, inputs = build(row=12, pattern=pattern, heads=heads), draw()
    parts = strided_parts(LENGTH, 12) if pattern == "strided" else fixed_parts(LENGTH, 12, 4)
    called = 0
    weigh = key_sets.weigh_once

    def count(*arguments: Any) -> Tensor:
        nonlocal called
        called += 1
        return weigh(*arguments)

    monkeypatch.setattr(key_sets, "weigh_once", count)
    monkeypatch.setattr(key_sets, "SCORES_KEPT", scores)
    found, expected = [], []
    for split, into in ((False, found), (None, expected), (True, found)):
        leaves = inputs.map(lambda part: part.clone().requires_grad_())
        if split is None:
            y = sparse(leaves, parts, heads)
        elif split:
            first, state = attention.attend(*leaves.block(0, 50)[:3])
            y = torch.cat([first, attention.attend(*leaves.block(50)[:3], state)[0]], dim=2)
        else:
            y, _ = attention.attend(*leaves[:3])
        into.append([y, *torch.autograd.grad(y.square().sum(), leaves.leaves())])
    for tensors in found:
        assert_all_agree(tensors, expected[0], FLOAT64)
    lists = {("strided", "merged"): 2, ("strided", "split"): 3, ("fixed", "merged"): 1, ("fixed", "split"): 2}
    # There are three calls of `attend`, and the backward pass computes all scores again.
    assert called > 6 * lists[pattern, heads], "there was only one group of lists"


@pytest.mark.parametrize("pattern", ["strided", "fixed"])
def test_scores_of_a_long_row_are_not_saved(pattern: str) -> None:
    attention, (q, k, v, _) = build(stride=1024, pattern=pattern), draw(1024).map(Tensor.requires_grad_)
    assert measure_saved_bytes(attention.attend, q, k, v) < 20 * v.nbytes


def test_the_default_stride_is_one_image_row() -> None:
    inputs = draw()
    expected = sparse(inputs, strided_parts(LENGTH, 17), "merged")
    assert_agree(build(row=17).attend(*inputs[:3])[0], expected, FLOAT64)
    assert_agree(build(row=28, stride=17).attend(*inputs[:3])[0], expected, FLOAT64)
    assert SparseOptions() == SparseOptions(pattern="strided", heads="merged")


def test_the_default_summary_is_at_most_one_row() -> None:
    inputs = draw()
    y, _ = build(row=3, pattern="fixed").attend(*inputs[:3])
    assert_agree(y, sparse(inputs, fixed_parts(LENGTH, 3, 3), "merged"), FLOAT64)


@pytest.mark.parametrize("pattern", ["strided", "fixed"])
def test_the_work_of_a_step_grows_with_the_square_root_of_the_positions(pattern: str) -> None:
    """Work is counted in rows read from the cache. The image has as many rows as columns."""
    for row in (10, 20, 40):
        attention = build(row=row, pattern=pattern)
        last = torch.tensor([row * row - 1])
        seen = sum(
            int(stack_spans(spans, last + 1)[..., 2].sum()) for _, spans in attention.list_patterns(last)[0].sets
        )
        assert seen == row + (row - 1) * (1 if pattern == "strided" else 4)


def test_invalid_options_are_refused() -> None:
    with pytest.raises(UsageError, match="'summary' is for pattern 'fixed'; 'strided' has no blocks"):
        parse_options("sparse", {"summary": 3})
    with pytest.raises(UsageError, match=r"'summary' must be at most 'stride' \(8\), found 9"):
        parse_options("sparse", {"pattern": "fixed", "stride": 8, "summary": 9})
    with pytest.raises(UsageError, match=r"'summary' must be at most the block length 28 \(one row\), found 29"):
        build(pattern="fixed", summary=29)
    with pytest.raises(UsageError, match="heads 'split' needs two heads or more, found 1; use 'merged'"):
        build(1, heads="split")
