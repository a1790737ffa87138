"""Tests particular to Nystrom attention; test_contract.py covers what all mechanisms share."""

import functools

import pytest
import torch
from attention.arguments import build_one, draw_parts
from tolerances import FLOAT64, assert_agree
from torch.nn import functional

from linformer_cli.attention.base import fork_state, measure_state_bytes
from linformer_cli.attention.nystrom import NystromAttention, NystromOptions
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


def test_the_default_is_six_iterations_and_a_convolution() -> None:
    options = NystromOptions()
    assert (options.iterations, options.kernel, options.landmarks) == (6, 33, 32)
    assert build(kernel=0).convolution is None


def test_initial_landmarks_are_normal_and_equal() -> None:
    attention = build(landmarks=500)
    assert torch.equal(attention.landmark_queries, attention.landmark_keys)
    assert attention.landmark_queries.data_ptr() != attention.landmark_keys.data_ptr()
    assert attention.landmark_queries.mean().abs() < 0.05
    assert (attention.landmark_queries.std() - 1).abs() < 0.05


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


def test_images_share_one_z() -> None:
    attention = build()
    assert attention.init_state(3, 1, CPU, torch.float64).inverse.tensor.shape == (2, 4, 4)
    sizes = [attention.state_bytes(batch, 1, torch.float64) for batch in (1, 2, 3)]
    one_image = 8 * (2 * 4 * (5 + 1) + 2 * 4 * 5)  # averages, logs of their weights, and 4 values
    assert [size - sizes[0] for size in sizes] == [0, one_image, 2 * one_image]
    assert sizes[0] == one_image + 8 * 2 * 4 * 4 + 8
    state = attention.attend(*draw_parts(40))[1]
    for copies in (1, 3):
        assert measure_state_bytes(fork_state(state, copies)) == attention.state_bytes(2 * copies, 40, torch.float64)


def test_the_size_of_a_state_is_known_without_z(monkeypatch) -> None:
    """On the meta device, the computation of Z would import torch's compiler."""
    attention = build()
    expected = measure_state_bytes(attention.init_state(2, 1, CPU, torch.float64))
    monkeypatch.setattr(NystromAttention, "invert", None)
    assert attention.state_bytes(2, 1, torch.float64) == expected


def test_the_state_is_the_averages_and_the_logs_of_their_weights() -> None:
    attention = build()
    q, k, v = draw_parts(40)
    _, state = attention.attend(q, k, v)
    scores = attention.landmark_queries @ k.transpose(-1, -2) / 6**0.5
    assert_agree(state.averages, scores.softmax(-1) @ v, FLOAT64)
    assert_agree(state.log_weights, scores.logsumexp(-1), FLOAT64)


def test_a_kernel_of_one_position_is_refused() -> None:
    with pytest.raises(UsageError, match=r"kernel.*2 or more, or 0 for none.*found 1"):
        parse_options("nystrom", {"kernel": 1})
