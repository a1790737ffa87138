"""Tests particular to Nystrom attention; test_contract.py covers what all mechanisms share."""

import functools

import pytest
import torch
from attention.arguments import build_one, draw_parts
from tolerances import FLOAT64, assert_agree
from torch.nn import functional

from linformer_cli.attention.base import measure_state_bytes
from linformer_cli.attention.nystrom import NystromAttention
from linformer_cli.errors import UsageError
from linformer_cli.model.mixers import parse_options

CPU = torch.device("cpu")


build = functools.partial(build_one, "nystrom", landmarks=4, kernel=5, chunk=16)


def test_a_query_equal_to_a_landmark_gets_softmax_attention() -> None:
    """In this case f_t is a row of A, so f_t Z is a unit vector if Z is the inverse of A."""
    attention = build(kernel=0, iterations=12)
    _, k, v = draw_parts(40)
    chosen = torch.randint(4, (2, 2, 40), generator=torch.Generator().manual_seed(1))
    q = attention.landmark_queries.detach()[torch.arange(2)[:, None], chosen]
    with torch.no_grad():
        y, _ = attention.attend(q, k, v)
    assert_agree(y, functional.scaled_dot_product_attention(q, k, v, is_causal=True), FLOAT64)


def test_iterations_converge_to_the_inverse() -> None:
    errors = []
    for iterations in (1, 2, 4, 6, 12):
        attention = build(iterations=iterations, landmarks=16)
        queries, keys = attention.landmark_queries.detach(), attention.landmark_keys.detach()
        a = (queries @ keys.transpose(-1, -2) / 6**0.5).softmax(-1)
        z = attention.init_state(1, 1, CPU, torch.float64).inverse.tensor
        errors.append(float((a @ z - torch.eye(16, dtype=a.dtype)).abs().max()))
    assert errors == sorted(errors, reverse=True)
    assert errors[0] > 0.5
    assert errors[-1] < 1e-6
    assert errors[-2] > 1e-3, "Z must be the result of six iterations, not the exact inverse"


def test_steps_reuse_z_and_attend_recomputes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    attention = build()
    calls = []
    original = NystromAttention.invert_landmarks
    monkeypatch.setattr(
        NystromAttention, "invert_landmarks", lambda self, keys: calls.append(1) or original(self, keys)
    )
    q, k, v = draw_parts(40)
    state = attention.init_state(2, 40, CPU, torch.float64)
    assert len(calls) == 1
    z = state.inverse.tensor.clone()
    for t in range(5):
        _, state = attention.step(q[:, :, t], k[:, :, t], v[:, :, t], state)
    assert len(calls) == 1
    _, after = attention.attend(q, k, v, state)
    assert len(calls) == 2
    assert torch.equal(after.inverse.tensor, z)
    assert not after.inverse.tensor.requires_grad


def test_the_size_of_a_state_is_known_without_z(monkeypatch) -> None:
    """On the meta device, the computation of Z would import torch's compiler."""
    attention = build()
    expected = measure_state_bytes(attention.init_state(2, 1, CPU, torch.float64))
    monkeypatch.setattr(NystromAttention, "invert", None)
    assert attention.state_bytes(2, 1, torch.float64) == expected


def test_a_kernel_of_one_position_is_refused() -> None:
    with pytest.raises(UsageError, match=r"kernel.*2 or more, or 0 for none.*found 1"):
        parse_options("nystrom", {"kernel": 1})
