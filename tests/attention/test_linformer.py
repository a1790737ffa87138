"""Tests particular to Linformer; test_contract.py covers what all mechanisms share."""

import functools

import pytest
import torch
from attention.arguments import build_one, draw_parts, step_through
from attention.cases.linformer import SHARES
from tolerances import FLOAT64, assert_agree

from linformer_cli.errors import UsageError
from linformer_cli.model.mixers import parse_options

CPU = torch.device("cpu")


build = functools.partial(build_one, "linformer")


@pytest.mark.parametrize("way", ["attend", "step"])
def test_the_state_is_a_stack_of_rows_and_the_unfinished_block(way: str) -> None:
    attention = build(block=8, rank=2)
    q, k, v = draw_parts(19)
    if way == "attend":
        _, state = attention.attend(q, k, v)
    else:
        _, state = step_through(attention, [q, k, v], attention.init_state(2, 19, CPU, torch.float64))
    for stack, x, projection in (
        (state.keys, k, attention.key_projection),
        (state.values, v, attention.value_projection),
    ):
        rows = [projection @ x[:, :, start : start + 8] for start in (0, 8)]
        assert_agree(stack[:, :, :7], torch.cat([*rows, x[:, :, 16:]], dim=2), FLOAT64)
        assert stack.shape[2] == 2 * 2 + 8
    assert int(state.position) == 19


def test_the_default_block_is_a_row_and_the_default_rank_is_at_most_the_block() -> None:
    attention = build(row=12)
    assert attention.key_projection.shape == (2, 4, 12)
    narrow = build(row=3)
    assert narrow.key_projection.shape == (2, 3, 3)


@pytest.mark.parametrize("share", SHARES)
def test_shared_projections_are_one_named_tensor(share: str) -> None:
    """Otherwise a checkpoint would store the tensor more than once."""
    expected = {"none": [(2, 3, 8)] * 2, "heads": [(1, 3, 8)] * 2, "heads_keys_values": [(1, 3, 8)]}
    tensors = build(block=8, rank=3, share=share).state_dict()
    assert [tuple(tensor.shape) for tensor in tensors.values()] == expected[share]


def test_a_rank_above_the_block_is_refused() -> None:
    with pytest.raises(UsageError, match=r"'linformer': 'rank' must be at most 'block', found rank 9 and block 8"):
        parse_options("linformer", {"rank": 9, "block": 8})
    with pytest.raises(UsageError, match=r"'rank' must be at most the block length 12 \(one row\), found 13"):
        build(row=12, rank=13)
