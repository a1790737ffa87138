"""Tests of the feature maps: their width, their kernel phi(x) . phi(y), and edge cases of their inputs."""

import math

import pytest
import torch
from loops import loop_over
from tolerances import all_finite
from torch import Tensor

from linformer_cli.attention.base import AttentionShape
from linformer_cli.attention.parts.feature_maps import FEATURE_MAPS, FeatureMap, Learned
from linformer_cli.model.mixers import build_attention


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def build_map(name: str) -> FeatureMap:
    torch.manual_seed(4)
    return FEATURE_MAPS[name](3, 6).double()


@pytest.mark.parametrize("name", FEATURE_MAPS)
def test_gradients_match_finite_differences(name: str) -> None:
    assert torch.autograd.gradcheck(build_map(name), draw(1, 3, 2, 6).requires_grad_())


def test_elu_is_positive_where_elu_plus_one_underflows() -> None:
    x = torch.tensor([-50.0, -20.0, -17.0, -1.0, 0.0, 1e-3, 2.0, 80.0])
    phi = FEATURE_MAPS["elu"](1, 8)(x)
    assert bool((phi > 0).all())
    expected = torch.tensor([math.exp(value) if value < 0 else value + 1 for value in x.tolist()], dtype=torch.float64)
    assert phi.dtype == torch.float32
    torch.testing.assert_close(phi.double(), expected, rtol=2e-7, atol=0)


def test_elu_keeps_its_slope_far_below_zero() -> None:
    x = torch.tensor([-50.0, -20.0, -1.0, 3.0], requires_grad=True)
    FEATURE_MAPS["elu"](1, 4)(x).sum().backward()
    expected = torch.tensor([math.exp(-50), math.exp(-20), math.exp(-1), 1.0], dtype=torch.float64)
    torch.testing.assert_close(x.grad.double(), expected, rtol=2e-7, atol=0)


def test_taylor2_weights_are_at_least_one_half() -> None:
    feature_map = FEATURE_MAPS["taylor2"](1, 6)
    q = draw(1, 1, 1000, 6)
    # Keys along -q move the kernel through its minimum at x . y = -1.
    k = -q * torch.linspace(0, 3, 1000, dtype=torch.float64)[:, None]
    weights = (feature_map(q) * feature_map(k)).sum(dim=-1)
    assert bool((weights >= 0.5 - 1e-12).all())
    assert weights.min() < 0.501


def test_poly2_keeps_its_precision_in_a_model_cast_to_bfloat16() -> None:
    x = draw(1, 3, 5, 6)
    assert torch.equal(build_map("poly2").bfloat16()(x), build_map("poly2")(x))


def test_no_learned_feature_is_always_zero_initially() -> None:
    torch.manual_seed(4)
    alive = Learned(3, 6, 200)(draw(4, 3, 50, 6, dtype=torch.float32)) > 0
    assert 0.4 < alive.double().mean() < 0.7
    assert bool(alive.flatten(0, 0).any(dim=2).any(dim=0).all())


@loop_over("dtype", [torch.float32, torch.float64])
@loop_over("key", FEATURE_MAPS)
@loop_over(("queries", "keys"), [(1.0, 1e4), (1e4, 1.0), (1e4, 1e4), (-1e4, 1e4), (0.0, 0.0), (1e-30, 1e-30)])
def test_large_and_vanishing_sums_give_finite_results(key, queries, keys, dtype) -> None:
    """The inputs have keys of 1e4, weights of 0 and weights that underflow. Attend and step are both tested."""
    torch.manual_seed(3)
    attention = build_attention("linear", {"feature_map": key}, AttentionShape(2, 8, 5, 784, 28)).to(dtype)
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, 2, 50, width, generator=generator, dtype=dtype) for width in (8, 8, 5))
    leaves = [(queries * q).requires_grad_(), (keys * k.abs()).requires_grad_(), v.requires_grad_()]
    y, _ = attention.attend(*leaves)
    assert bool(torch.isfinite(y).all())
    assert bool((y.detach().abs() < 1e3 * v.detach().abs().max()).all())
    assert all_finite(torch.autograd.grad(y.sum(), leaves))
    state = attention.init_state(2, 50, torch.device("cpu"), dtype)
    for t in range(50):
        y_t, state = attention.step(*(part[:, :, t] for part in leaves), state)
        assert bool(torch.isfinite(y_t).all())
