"""Tests particular to BigBird attention; test_contract.py covers what all mechanisms share."""

import functools

import torch
from attention.arguments import build_one, draw_parts
from attention.cases.bigbird import bigbird, drawn_blocks
from tolerances import FLOAT64, assert_agree

from linformer_cli.attention.bigbird import draw_blocks

CPU = torch.device("cpu")


build = functools.partial(build_one, "bigbird", key_width=4, value_width=4)
draw = functools.partial(draw_parts, widths=(4, 4, 4))


def test_a_query_sees_the_expected_positions() -> None:
    """Equal keys give equal weights to all visible positions, and one-hot values identify these positions."""
    attention = build(value_width=40, block=2, globals=1, random=2)
    q, k, _ = draw(40)
    k[:] = 1.0
    y, _ = attention.attend(q, k, torch.eye(40, dtype=torch.float64).expand(2, 2, 40, 40))
    for head in range(2):
        blocks = [0, *drawn_blocks(0, 0, head, 14, 1, 2), 12, 13]
        assert len(set(blocks)) == 5
        expected = torch.zeros(40, dtype=torch.float64)
        expected[[2 * block + place for block in blocks for place in range(2)] + [28]] = 1 / 11
        assert_agree(y[0, head, 28], expected, FLOAT64)


def test_drawn_blocks_match_the_reference() -> None:
    for seed, layer, first, count in ((0, 0, 1, 2), (2**63 - 1, 3, 0, 7), (5, 1, 4, 1)):
        found = draw_blocks(seed, layer, heads=3, blocks=40, first=first, count=count)
        assert found.shape == (3, 40, count)
        for head in range(3):
            for block in range(40):
                expected = drawn_blocks(seed, layer, head, block, first, count)
                assert found[head, block, : len(expected)].tolist() == expected


def test_sequences_may_be_longer_than_the_image() -> None:
    attention = build(positions=100, row=10, block=4, random=1)
    inputs = draw(170)
    y, _ = attention.attend(*inputs)
    assert_agree(attention.attend(*(part[:, :, :50] for part in inputs))[0], y[:, :, :50], FLOAT64)
    assert_agree(y, bigbird(*inputs, 4, 1, 1), FLOAT64)


def test_the_default_block_is_a_row_but_at_most_64_positions() -> None:
    assert [build(row=row).block for row in (28, 96)] == [28, 64]


def test_a_late_step_reads_only_its_visible_blocks() -> None:
    attention = build(block=4)
    q, k, v = draw(400)
    state = attention.attend(q, k, v, attention.init_state(2, 400, CPU, torch.float64))[1]
    # The query sees 6 blocks. All others are overwritten with NaN, so reading one would be noticed.
    for head in range(2):
        seen = {0, 97, 98, 99, *drawn_blocks(0, 0, head, 99, 1, 2)}
        unseen = [j for j in range(400) if j // 4 not in seen]
        state.keys[:, head, unseen] = torch.nan
        state.values[:, head, unseen] = torch.nan
    state = state._replace(position=state.position - 1)
    y_t, _ = attention.step(q[:, :, -1], k[:, :, -1], v[:, :, -1], state)
    assert_agree(y_t, attention.attend(q, k, v)[0][:, :, -1], FLOAT64)
