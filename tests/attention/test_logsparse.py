"""Tests of LogSparse attention; test_contract.py covers the rest."""

import pytest
import torch
from attention.measures import LargestTensor
from tolerances import FLOAT64, assert_agree

from linformer_cli.attention.base import AttentionShape
from linformer_cli.model.mixers import build_attention

SHAPE = AttentionShape(1, 4, 4, positions=784, row=28)


def seen_by_last(length: int, **options: int) -> list[int]:
    """Return the positions with a weight in the last output, if all keys are equal and position j has value e_j."""
    keys, values = torch.zeros(1, 1, length, 4), torch.eye(length).view(1, 1, length, length)
    y, _ = build_attention("logsparse", options, SHAPE).attend(keys, keys, values)
    seen = y[0, 0, -1].nonzero().flatten().tolist()
    assert_agree(y[0, 0, -1, seen], torch.full((len(seen),), 1 / len(seen)), 1e-6)
    return seen


@pytest.mark.parametrize(
    ("options", "seen"),
    [
        ({}, [4, 12, 16, 18, 19, 20]),
        ({"window": 3}, [2, 10, 14, 16, 17, 18, 19, 20]),
        ({"restart": 8}, [0, 2, 3, 4, 8, 10, 11, 12, 16, 18, 19, 20]),
        ({"window": 2, "restart": 5}, [0, 2, 3, 4, 5, 7, 8, 9, 10, 12, 13, 14, 15, 17, 18, 19, 20]),
        ({"window": 30}, list(range(21))),
    ],
)
def test_the_last_of_21_positions_sees_the_expected_positions(options: dict[str, int], seen: list[int]) -> None:
    """The distances are 0, 1, 2, 4, 8 and 16 with a window of 1. `restart` repeats the distances below it."""
    assert seen_by_last(21, **options) == seen


@pytest.mark.parametrize("options", [{}, {"window": 4, "restart": 64}])
def test_no_tensor_holds_all_pairs(options: dict[str, int]) -> None:
    """The largest tensor of a forward and backward pass grows by about as much as T log T."""
    mechanism, sizes = build_attention("logsparse", options, SHAPE), []
    for length in (1024, 4096):
        q, k, v = (torch.randn(1, 1, length, 4).requires_grad_() for _ in range(3))
        with LargestTensor() as largest:
            mechanism.attend(q, k, v)[0].sum().backward()
        sizes.append(largest.numel)
    assert sizes[0] > 1024 * 10 and sizes[1] < 5 * sizes[0]


def test_a_block_after_a_prefix_needs_only_its_own_scores() -> None:
    """A short block after a long prefix gives the same outputs, and computes no row of scores for the prefix."""
    mechanism = build_attention("logsparse", {"restart": 50}, SHAPE)
    q, k, v = (torch.randn(1, 1, 230, 4, dtype=torch.float64) for _ in range(3))
    whole, _ = mechanism.attend(q, k, v)
    _, state = mechanism.attend(*(x[:, :, :220] for x in (q, k, v)))
    with LargestTensor() as largest:
        block, _ = mechanism.attend(*(x[:, :, 220:] for x in (q, k, v)), state)
    assert_agree(block, whole[:, :, 220:], FLOAT64)
    assert largest.numel < 230 * 8
