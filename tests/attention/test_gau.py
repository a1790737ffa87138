"""Tests of the gated attention unit and of the code that it shares with flash; test_contract.py covers the rest."""

from typing import Any

import pytest
import torch
from attention.arguments import build_one
from attention.cases.gau import fill_parameters
from tolerances import FLOAT64, assert_agree, assert_all_agree
from torch import Tensor

from linformer_cli.attention import gau as gau_module
from linformer_cli.attention.base import Attention, AttentionShape
from linformer_cli.attention.catalogue import fit_attention
from linformer_cli.errors import UsageError
from linformer_cli.model.mixers import build_attention, parse_options

CPU = torch.device("cpu")
GATED = ["gau", "flash"]


def build(
    name: str = "gau", positions: int = 784, dtype: torch.dtype = torch.float64, filled: bool = True, **options: Any
) -> Attention:
    mechanism = build_one(name, heads=1, positions=positions, **options)
    if filled:
        fill_parameters(positions)(mechanism)
    return mechanism.to(dtype)


def draw(length: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    z, v = (torch.randn(2, 1, length, width, generator=generator, dtype=torch.float64).to(dtype) for width in (6, 5))
    return z, v


def test_two_positions_match_a_computation_by_hand() -> None:
    mechanism = build_attention("gau", {}, AttentionShape(1, 1, 1, positions=4, row=2)).double()
    for parameter, value in (
        (mechanism.query.scale, [2.0]),
        (mechanism.query.offset, [1.0]),
        (mechanism.key.scale, [4.0]),
        (mechanism.key.offset, [0.0]),
        (mechanism.bias, [0.5, -0.25, 9.0, 9.0]),
    ):
        parameter.data = torch.tensor(value, dtype=torch.float64)
    z, v = (torch.tensor(values, dtype=torch.float64).view(1, 1, 2, 1) for values in ([1.0, 0.5], [1.0, 10.0]))
    # With q = (3, 2) and k = (4, 2), the scores are 3 * 4 / 4 + 0.5 at (0, 0), 2 * 4 / 4 - 0.25 at (1, 0), and
    # 2 * 2 / 4 + 0.5 at (1, 1).
    expected = torch.tensor([3.5**2, 1.75**2 + 10 * 1.5**2], dtype=torch.float64)
    assert_agree(mechanism.attend(z, z, v)[0].flatten(), expected, FLOAT64)


@pytest.mark.parametrize("rows", [1, 7, 16, 40, 1000])
@pytest.mark.parametrize("scale", ["length", "width"])
def test_the_result_does_not_depend_on_how_many_rows_are_computed_at_once(monkeypatch, rows: int, scale: str) -> None:
    mechanism, (z, v) = build(scale=scale), draw(40)
    leaves = [z.requires_grad_(), v.requires_grad_(), *mechanism.parameters()]

    def run() -> tuple[Tensor, ...]:
        y, _ = mechanism.attend(z, z, v)
        return y, *torch.autograd.grad(y.square().sum(), leaves)

    monkeypatch.setattr(gau_module, "ROWS_AT_ONCE", 13)
    expected = run()
    monkeypatch.setattr(gau_module, "ROWS_AT_ONCE", rows)
    assert_all_agree(run(), expected, FLOAT64)


def test_sequences_longer_than_the_bias_are_refused(raises_one_line: Any) -> None:
    mechanism, (z, v) = build(positions=10), draw(11)
    parts = ("'gau'", "10 positions", "found 11", "scale=width")
    with raises_one_line(UsageError, *parts):
        mechanism.attend(z, z, v)
    first = [part[:, :, :6] for part in (z, z, v)]
    _, state = mechanism.attend(*first, mechanism.init_state(2, 20, CPU, torch.float64))
    with raises_one_line(UsageError, *parts):
        mechanism.attend(*(part[:, :, 6:] for part in (z, z, v)), state)
    for t in range(6, 10):
        _, state = mechanism.step(z[:, :, t], z[:, :, t], v[:, :, t], state)
    with raises_one_line(UsageError, *parts):
        mechanism.step(z[:, :, 10], z[:, :, 10], v[:, :, 10], state)


def test_without_a_bias_the_length_is_unlimited() -> None:
    mechanism, (z, v) = build(positions=10, scale="width"), draw(12)
    y, state = mechanism.attend(*(part[:, :, :11] for part in (z, z, v)))
    y_t, _ = mechanism.step(z[:, :, 11], z[:, :, 11], v[:, :, 11], state)
    assert_agree(torch.cat([y, y_t.unsqueeze(2)], dim=2), mechanism.attend(z, z, v)[0], FLOAT64)


@pytest.mark.parametrize("name", GATED)
@pytest.mark.parametrize(("scale", "centre"), [("length", 0.0), ("width", 1.0)])
def test_initial_parameters_have_the_documented_mean_and_spread(name: str, scale: str, centre: float) -> None:
    torch.manual_seed(0)
    mechanism = build_attention(name, {"scale": scale}, AttentionShape(1, 128, 8, positions=784, row=28))
    parameters = dict(mechanism.named_parameters())
    assert len(parameters) == (4 if name == "gau" else 8) + (scale == "length")
    for key, parameter in parameters.items():
        if key.endswith("offset"):
            assert not parameter.any()
        else:
            mean, deviation = (0.0, 0.1) if key == "bias" else (centre, 0.02)
            assert parameter.mean().item() == pytest.approx(mean, abs=deviation / 3)
            assert parameter.std().item() == pytest.approx(deviation, rel=0.2)
    if scale == "length":
        assert len(parameters["bias"]) == (784 if name == "gau" else 256)


def test_attend_and_step_round_keys_alike_in_a_wider_cache() -> None:
    """Under autocast, projections return bfloat16, but the cache is float32."""
    mechanism, (z, v) = build(dtype=torch.float32), draw(40, torch.bfloat16)
    with torch.no_grad():
        _, attended = mechanism.attend(z, z, v, mechanism.init_state(2, 40, CPU, torch.float32))
        stepped = mechanism.init_state(2, 40, CPU, torch.float32)
        for t in range(40):
            _, stepped = mechanism.step(z[:, :, t], z[:, :, t], v[:, :, t], stepped)
    assert torch.equal(attended.keys, stepped.keys)


@pytest.mark.parametrize("name", GATED)
@pytest.mark.parametrize("scale", ["length", "width"])
def test_all_parameters_have_gradients_initially(name: str, scale: str) -> None:
    """Initially, scales are near 0 and offsets are 0. Every parameter must still have a gradient."""
    options = {"chunk": 16} if name == "flash" else {}
    mechanism, (z, v) = build(name, positions=40, filled=False, scale=scale, **options), draw(40)
    y, _ = mechanism.attend(z, z, v)
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    (y * weights).sum().backward()
    for key, parameter in mechanism.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().max() > 1e-8, key


@pytest.mark.parametrize("name", GATED)
def test_a_model_has_one_head_with_its_own_widths(name: str) -> None:
    shape = AttentionShape(heads=4, key_width=32, value_width=32, positions=784, row=28, layer=3)
    fitted = fit_attention(name, parse_options(name, {}), shape, width=96).shape
    assert (fitted.heads, fitted.key_width, fitted.value_width) == (1, 128, 192)
    assert (fitted.positions, fitted.row, fitted.layer) == (784, 28, 3)
    assert fit_attention(name, parse_options(name, {"z_width": 20}), shape, width=96).shape.key_width == 20
    assert fit_attention("linear", parse_options("linear", {}), shape, width=96).shape == shape


@pytest.mark.parametrize("name", GATED)
def test_more_than_one_head_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"'{name}' has one head, found 2"):
        build_attention(name, {}, AttentionShape(2, 6, 5, positions=784, row=28))
