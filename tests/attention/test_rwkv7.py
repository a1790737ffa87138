"""Tests particular to RWKV-7; test_contract.py covers what all mechanisms share."""

import functools
import math
from typing import Any

import pytest
import torch
from attention.arguments import build_one, draw_parts
from tolerances import FLOAT64, assert_agree

# The sigmoid of this scalar is 1 in every type, and the sigmoid of its negative is 0.
CERTAIN = 2000.0


build = functools.partial(build_one, "rwkv7", key_width=4)


def draw(length: int = 40, extra: int = 8) -> list[Any]:
    return draw_parts(length, widths=(4, 4, 5, extra))


@pytest.mark.parametrize(("row", "shortest"), [(28, 28), (1, 2)])
def test_initial_memories_of_a_head_range_from_an_image_to_a_row(row: int, shortest: float) -> None:
    """The memory is the number of positions after which a value has decayed to 1/e."""
    attention = build(row=row)
    q, k, v, _, extra = draw(2)
    # The learning rate is 0, so nothing is removed. The second key is 0, so the first value only decays.
    extra[..., :4], extra[..., 4:], k[:, :, 1] = 0, -CERTAIN, 0
    attention.replacement.data.zero_()
    first, last = (
        attention.attend(*(part[:, :, :end] for part in (q, k, v)), None, extra[:, :, :end])[1].s for end in (1, 2)
    )
    memories = -1 / (last / first).log()
    expected = 784 * (shortest / 784) ** (torch.arange(4, dtype=torch.float64) / 3)
    assert_agree(memories[0, 0, :, 0], expected, 1e-4)
    assert_agree(memories, memories[:1, :1, :, :1].expand_as(memories), 1e-9)


def test_the_fastest_decay_is_that_of_the_source() -> None:
    attention = build()
    q, k, v, _, extra = draw(2)
    extra[..., :4], extra[..., 4:], k[:, :, 1] = CERTAIN, -CERTAIN, 0
    attention.replacement.data.zero_()
    first, last = (
        attention.attend(*(part[:, :, :end] for part in (q, k, v)), None, extra[:, :, :end])[1].s for end in (1, 2)
    )
    assert_agree(last, math.exp(-math.exp(-0.5)) * first, FLOAT64)
