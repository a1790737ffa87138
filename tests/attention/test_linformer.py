"""Tests particular to Linformer; test_contract.py covers what all mechanisms share."""

import functools

import pytest
from attention.arguments import build_one
from attention.cases.linformer import SHARES

from linformer_cli.errors import UsageError
from linformer_cli.model.mixers import parse_options

build = functools.partial(build_one, "linformer")


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
