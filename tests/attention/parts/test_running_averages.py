"""Compares running averages, computed in chunks, with their definition, computed for all positions at once."""

import math

import pytest
import torch
from attention.measures import measure_saved_bytes
from loops import loop_over
from tolerances import FLOAT32_DRIFT, FLOAT64, assert_all_agree
from torch import Tensor

from linformer_cli.attention.parts.running_averages import NOTHING, read_running_averages

BATCH, HEADS, LANDMARKS, WIDTH = 2, 2, 3, 4
Parts = list[Tensor]


def define(gates: Tensor, scores: Tensor, v: Tensor, averages: Tensor, log_weights: Tensor) -> tuple[Tensor, ...]:
    """Treat the initial state as one more value per landmark; the score of this value is the log of its weight."""
    scores = torch.cat([log_weights.unsqueeze(2), scores], dim=2).transpose(2, 3).unsqueeze(2)
    length = v.shape[2]
    future = torch.ones(length, 1 + length).triu(2) == 1
    weights = scores.masked_fill(future[:, None, :], -math.inf).softmax(-1)
    b = weights[..., 1:] @ v.unsqueeze(2) + weights[..., :1] * averages.unsqueeze(2)
    return (gates.unsqueeze(-2) @ b).squeeze(-2), b[:, :, -1], scores[:, :, 0].logsumexp(-1)


def draw(length: int, carry: bool, spread: float = 3.0, dtype: torch.dtype = torch.float64) -> Parts:
    generator = torch.Generator().manual_seed(length)

    def normal(*size: int) -> Tensor:
        return torch.randn(BATCH, HEADS, *size, generator=generator, dtype=torch.float64).to(dtype)

    gates, scores, v = normal(length, LANDMARKS), spread * normal(length, LANDMARKS), normal(length, WIDTH)
    averages, log_weights = normal(LANDMARKS, WIDTH), spread * normal(LANDMARKS)
    if not carry:
        averages, log_weights = torch.zeros_like(averages), torch.full_like(log_weights, NOTHING)
    return [part.requires_grad_() for part in (gates, scores, v, averages, log_weights)]


def weigh(outputs: tuple[Tensor, ...]) -> Tensor:
    """Return a weighted sum of all outputs; the weights differ."""
    return torch.stack([(y * torch.arange(1.0, 1 + y.numel()).view(y.shape).cos()).sum() for y in outputs]).sum()


@loop_over("carry", [False, True])
@loop_over("chunk", [1, 2, 8, 64])
@loop_over("length", [1, 2, 7, 8, 9, 50])
def test_outputs_state_and_gradients_match_the_definition(length: int, chunk: int, carry: bool) -> None:
    parts = draw(length, carry)
    found, expected = read_running_averages(*parts, chunk), define(*parts)
    assert_all_agree(found, expected, FLOAT64)
    gradients = torch.autograd.grad(weigh(found), parts), torch.autograd.grad(weigh(expected), parts)
    assert_all_agree(*gradients, FLOAT64)


@pytest.mark.parametrize("order", ["rising", "falling", "jump"])
def test_distant_scores_do_not_overflow(order: str) -> None:
    """Scores differ by up to 2000. Without care, exp(2000) would overflow."""
    parts = [part.detach() for part in draw(40, carry=False, dtype=torch.float32)]
    scores = torch.linspace(-1000, 1000, 40) if order != "jump" else 1000.0 * (torch.arange(40) % 13 == 12)
    parts[1] = (scores.flip(0) if order == "falling" else scores)[:, None].expand_as(parts[1]).clone()
    parts = [part.requires_grad_() for part in parts]
    found, expected = read_running_averages(*parts, 16), define(*(part.double() for part in parts))
    assert_all_agree(found, expected, FLOAT32_DRIFT)
    gradients = torch.autograd.grad(weigh(found), parts), torch.autograd.grad(weigh(expected), parts)
    assert_all_agree(*gradients, FLOAT32_DRIFT)


def test_saved_bytes_grow_linearly_and_stay_small() -> None:
    saved = []
    for length in (512, 2048):
        parts = draw(length, carry=True, dtype=torch.float32)
        saved.append(measure_saved_bytes(read_running_averages, *parts, 16))
    assert 3.5 * saved[0] < saved[1] < 4.5 * saved[0]
    # Gates, scores, logs, values, and one set of averages per 16 positions are saved.
    assert saved[1] < 1.1 * 2048 * BATCH * HEADS * 4 * (3 * LANDMARKS + WIDTH + LANDMARKS * (WIDTH + 1) / 16)
