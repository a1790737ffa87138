"""Tests of linear layers with an activation: torch's form, and the form with fewer passes over memory in bfloat16."""

import torch
from loops import loop_over
from machine import needs_library, use_threads
from tolerances import BFLOAT16, assert_agree
from torch import Tensor, nn
from torch.nn import functional

from linformer_cli.model.linear_layers import Linear
from linformer_cli.native.library import reference_only

ACTIVATIONS = {"none": lambda x: x, "relu": functional.relu, "gelu": functional.gelu}
# More inputs than outputs, and the reverse; more rows than pieces, and a width that fills no vector.
SIZES = [(24, 40), (40, 24), (3, 7), (256, 1024)]


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def differentiate(layer: nn.Linear, x: Tensor, of_y: Tensor, activation: str) -> list[Tensor]:
    """Return the output under autocast to bfloat16, and the gradients of x, weight and bias."""
    x = x.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x, activation)
    assert y.dtype == torch.bfloat16
    return [y.detach(), *torch.autograd.grad((y.float() * of_y).sum(), [x, *layer.parameters()])]


def define(layer: nn.Linear, x: Tensor, of_y: Tensor, activation: str) -> list[Tensor]:
    """Return what `differentiate` returns, in float64, from the definition."""
    x, weight, bias = (part.detach().double().requires_grad_() for part in (x, layer.weight, layer.bias))
    y = ACTIVATIONS[activation](x @ weight.T + bias)
    return [y.detach(), *torch.autograd.grad((y * of_y.double()).sum(), [x, weight, bias])]


@loop_over("activation", ["none", "relu"])
@loop_over("dtype", [torch.float32, torch.bfloat16])
def test_small_integers_give_exact_results(form, activation: str, dtype: torch.dtype) -> None:
    """Every sum is an integer below 256, which bfloat16 can represent."""
    layer, x, of_y = Linear(5, 6), draw(3, 11, 5).sign(), draw(3, 11, 6, seed=1).sign()
    for seed, parameter in enumerate(layer.parameters()):
        parameter.data = (2 * draw(*parameter.shape, seed=seed)).round()
    found = differentiate(layer, x.to(dtype), of_y, activation)
    assert [part.dtype for part in found[1:]] == [dtype, torch.float32, torch.float32]
    for one, other in zip(found, define(layer, x, of_y, activation), strict=True):
        assert one.shape == other.shape and torch.equal(one.double(), other)


@loop_over("activation", ACTIVATIONS)
@loop_over("sizes", SIZES)
def test_results_and_gradients_are_those_of_the_definition(form, activation: str, sizes: tuple[int, int]) -> None:
    torch.manual_seed(0)
    layer = Linear(*sizes)
    x, of_y = draw(2, 50, sizes[0]).bfloat16(), draw(2, 50, sizes[1], seed=1).bfloat16().float()
    layer.weight.data, layer.bias.data = (part.data.bfloat16().float() for part in layer.parameters())
    found, expected = (function(layer, x, of_y, activation) for function in (differentiate, define))
    with reference_only():
        plain = differentiate(layer, x, of_y, activation)
    for one, other, reference in zip(found, plain, expected, strict=True):
        assert_agree(one, reference, BFLOAT16)
        # The compiled form rounds no more often than plain torch, but not in the same places.
        errors = [float((part.double() - reference).norm()) for part in (one, other)]
        assert errors[0] <= 1.05 * errors[1] + 1e-6


@loop_over("activation", ACTIVATIONS)
def test_nan_stays_in_its_row_and_reaches_the_gradients(form, activation: str) -> None:
    layer, x, of_y = Linear(5, 6), draw(9, 5), torch.ones(9, 6)
    x[4, 2] = torch.nan
    y, of_x, of_weight, _ = differentiate(layer, x, of_y, activation)
    assert bool(y[4].isnan().all()) and bool(y[torch.arange(9) != 4].isfinite().all())
    assert bool(of_weight[:, 2].isnan().all())
    assert bool(of_x[torch.arange(9) != 4].isfinite().all())
    layer.weight.data[3] = torch.nan
    assert bool(differentiate(layer, x, of_y, activation)[0][:, 3].isnan().all())


@needs_library
def test_the_gradient_of_the_bias_does_not_depend_on_threads() -> None:
    layer, x, of_y = Linear(8, 64), draw(3000, 8), draw(3000, 64, seed=1)
    expected = differentiate(layer, x, of_y, "gelu")[3]
    for count in (2, 5):
        with use_threads(count):
            assert torch.equal(differentiate(layer, x, of_y, "gelu")[3], expected)


@loop_over("activation", ACTIVATIONS)
@loop_over("dtype", [torch.float32, torch.float64])
def test_without_autocast_the_layer_is_torchs(form, activation: str, dtype: torch.dtype) -> None:
    layer, x = Linear(5, 6).to(dtype), draw(9, 5).to(dtype)
    expected = ACTIVATIONS[activation](functional.linear(x, layer.weight, layer.bias))
    assert torch.equal(layer(x, activation), expected)


def test_any_number_of_dimensions_is_supported(form) -> None:
    layer = Linear(5, 6)
    with torch.autocast("cpu", torch.bfloat16):
        for shape in ((5,), (0, 5), (2, 0, 5), (1, 2, 3, 5)):
            assert layer(draw(*shape), "relu").shape == (*shape[:-1], 6)
