"""Tests particular to LSH attention; test_contract.py covers what all mechanisms share."""

import functools
import math

import pytest
import torch
from attention.arguments import build_one, step_through
from attention.cases.lsh import lsh, scores, seen_by_rounds
from attention.inputs import Inputs
from loops import first_fast
from tolerances import FLOAT64, assert_agree
from torch import Tensor

from linformer_cli.attention.lsh import LshAttention
from linformer_cli.errors import UsageError
from linformer_cli.model.mixers import build_attention, parse_options

CPU = torch.device("cpu")
LENGTH = 130


build = functools.partial(build_one, "lsh")


def draw(length: int = LENGTH, dtype: torch.dtype = torch.float64, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q, v = (torch.randn(2, 2, length, width, generator=generator, dtype=torch.float64).to(dtype) for width in (6, 5))
    return q, v


@pytest.mark.parametrize("rounds", [1, 2, 5])
def test_combined_rounds_equal_one_softmax_over_their_union(rounds: int) -> None:
    """The source takes one softmax per round and combines the rounds by their logsumexp.

    It subtracts from each logit the logarithm of the number of rounds that see the key.
    """
    attention, (q, v) = build(rounds=rounds, buckets=4, window=6), draw()
    seen = seen_by_rounds(q, attention.rotations, 6)
    times = seen.sum(dim=0)
    if rounds > 1:
        assert bool((times > 1).any()), "no key was found twice"
    logits = (scores(q) - times.clamp(min=1).double().log()).masked_fill(~seen, -math.inf)
    some = seen.any(dim=-1)
    joined = logits.logsumexp(dim=-1).masked_fill(~some, -math.inf).softmax(dim=0).nan_to_num()
    by_round = logits.masked_fill(~some.unsqueeze(-1), 0).softmax(dim=-1) @ v
    expected = torch.where(some.any(dim=0).unsqueeze(-1), (joined.unsqueeze(-1) * by_round).sum(dim=0), v)
    assert_agree(attention.attend(q, q, v)[0], expected, FLOAT64)


def test_a_position_without_neighbours_returns_its_own_value() -> None:
    attention, (q, v) = build(rounds=1, buckets=4, window=3), draw(12)
    # All queries point in one direction, except for one in the opposite direction.
    q = q[:, :, :1].expand_as(q).clone()
    q[:, :, 7] *= -1
    q.requires_grad_()
    y, _ = attention.attend(q, q, v)
    assert torch.equal(y[:, :, [0, 7]], v[:, :, [0, 7]])
    assert_agree(y[:, :, 1], v[:, :, 0], FLOAT64)
    assert_agree(y[:, :, 8], v[:, :, 4:7].mean(dim=2), FLOAT64)
    (gradient,) = torch.autograd.grad(y.square().sum(), q)
    assert bool(torch.isfinite(gradient).all())
    stepped, _ = step_through(attention, (q.detach(), q.detach(), v), attention.init_state(2, 12, CPU, torch.float64))
    assert_agree(stepped, y.detach(), FLOAT64)


@pytest.mark.parametrize("length", first_fast([7, 700]))
def test_very_few_and_very_many_buckets_match_the_definition(length: int) -> None:
    """Bucket codes have 16 bits if that is enough, otherwise 32. The number of bits must not change what is seen."""
    for options in ({"rounds": 2, "buckets": 2, "window": 3}, {"rounds": 2, "buckets": 600, "window": 60}):
        attention, (q, v) = build(**options), draw(length)
        with torch.no_grad():
            expected = lsh_of(attention, q, v)
            assert_agree(attention.attend(q, q, v)[0], expected, FLOAT64)
            cut = length // 3
            first, state = attention.attend(q[:, :, :cut], q[:, :, :cut], v[:, :, :cut])
            rest, _ = attention.attend(q[:, :, cut:], q[:, :, cut:], v[:, :, cut:], state)
            assert_agree(torch.cat([first, rest], dim=2), expected, FLOAT64)


def lsh_of(attention: LshAttention, q: Tensor, v: Tensor) -> Tensor:
    return lsh(Inputs(q, q, v), attention.rotations, attention.options.window)


def test_the_rotations_are_saved_and_drawn_from_the_seed() -> None:
    attention = build()
    assert torch.equal(attention.state_dict()["rotations"], build().rotations)
    torch.manual_seed(3)
    other = build_attention("lsh", {}, attention.shape).double()
    q, v = draw()
    expected, _ = attention.attend(q, q, v)
    assert (other.attend(q, q, v)[0] - expected).abs().max() > 0.1
    other.load_state_dict(attention.state_dict())
    assert torch.equal(other.attend(q, q, v)[0], expected)


@pytest.mark.parametrize("cast", [torch.bfloat16, torch.float32])
def test_attend_and_step_use_the_rotations_after_a_cast(cast: torch.dtype) -> None:
    attention, (q, v) = build(rounds=4, buckets=16, window=8), draw()
    drawn = attention.rotations.clone()
    attention.to(cast)
    assert torch.equal(attention.rotations.double(), drawn) == (cast is torch.float32)
    attention.double()
    y, _ = attention.attend(q, q, v)
    assert_agree(y, lsh_of(attention, q, v), FLOAT64)
    stepped, _ = step_through(attention, (q, q, v), attention.init_state(2, LENGTH, CPU, torch.float64))
    assert_agree(stepped, y, FLOAT64)


def test_an_odd_number_of_buckets_is_refused() -> None:
    with pytest.raises(UsageError, match=r"buckets: must be even.*, found 7"):
        parse_options("lsh", {"buckets": 7})
