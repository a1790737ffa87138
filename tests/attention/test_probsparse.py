"""Tests of causal ProbSparse attention; test_contract.py covers the rest."""

import functools

import torch
from attention.arguments import build_one, draw_parts
from attention.measures import LargestTensor
from tolerances import FLOAT64, assert_agree
from torch import Tensor

build = functools.partial(build_one, "probsparse", key_width=4, value_width=3)
draw = functools.partial(draw_parts, widths=(4, 4, 3), batch=3)


def find_averages(y: Tensor, v: Tensor) -> Tensor:
    """True where an output is the mean of the values so far, bool [B, H, T]."""
    means = v.cumsum(dim=2) / torch.arange(1, v.shape[2] + 1).unsqueeze(1)
    return (y - means).abs().amax(dim=-1) < 1e-12


def test_decisions_match_a_computation_by_hand() -> None:
    """The first key is -1 and all others are 1. If t and its samples are c positions, M_t = 8 size / c."""
    mechanism = build(factor=0.5, block=4)
    assert (mechanism.active, mechanism.samples) == (1, 4)
    mechanism.sample.fill_(0)  # blocks 0, 1 and 2 have the samples (0, 1, 2, 3), (0, 2, 4, 6) and (0, 3, 6, 9)
    # The measures are (0, 4, 8/3, 2), (3.73, 4.2, 0.2, 3.84) and (4.4, 4, 4.32, 4.16); the thresholds are 4 and 4.2.
    sizes = [1.0, 1.0, 1.0, 1.0, 1.4, 2.1, 0.1, 2.4, 2.2, 2.0, 2.7, 2.6]
    q, k = (torch.tensor(x, dtype=torch.float64).view(12, 1).expand(1, 2, 12, 4) for x in (sizes, [-1.0] + [1.0] * 11))
    v = draw(12)[2][:1]
    averages = find_averages(mechanism.attend(q, k, v)[0], v)
    assert averages[0, 0, 4:].tolist() == [True, False, True, True, False, True, False, True]


def test_after_the_first_block_about_the_wanted_share_of_queries_attends() -> None:
    mechanism, (q, k, v) = build(factor=1.0, block=32), draw(784)
    assert (mechanism.active, mechanism.samples) == (4, 7)
    averages = find_averages(mechanism.attend(q, k, v)[0], v)
    assert not averages[:, :, 1:32].any()
    share = 1 - averages[:, :, 32:].double().mean().item()
    assert 4 / 32 < share < 1.5 * 4 / 32


def test_a_query_that_does_not_attend_has_no_effect() -> None:
    """Queries of the last block set no threshold. Smaller queries have smaller measures, so they still average."""
    mechanism, (q, k, v) = build(factor=1.0, block=32), draw(127)
    y, _ = mechanism.attend(q, k, v)
    averages = find_averages(y, v)
    averages[:, :, :96] = False
    assert averages.any()
    assert_agree(mechanism.attend(torch.where(averages.unsqueeze(-1), 0.01 * q, q), k, v)[0], y, FLOAT64)


def test_the_sample_is_saved_with_the_weights() -> None:
    mechanism, (q, k, v) = build(factor=1.0, block=32), draw(200)
    other = build(factor=1.0, block=32)
    other.sample.copy_((mechanism.sample + 2**19) % 2**20)
    before = other.attend(q, k, v)[0]
    other.load_state_dict(mechanism.state_dict())
    after, expected = other.attend(q, k, v)[0], mechanism.attend(q, k, v)[0]
    assert torch.equal(after, expected) and not torch.equal(before, expected)


def test_no_tensor_holds_all_pairs() -> None:
    mechanism, sizes = build(factor=1.0, block=32), []
    for length in (2048, 8192):
        leaves = [x[:1].requires_grad_() for x in draw(length, torch.float32)]
        with LargestTensor() as largest:
            mechanism.attend(*leaves)[0].sum().backward()
        sizes.append(largest.numel)
    assert sizes[1] < 3 * 2 * 2**18 and sizes[1] < 5 * sizes[0]
