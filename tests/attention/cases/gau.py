"""Reference for the gated attention unit, computed with T x T weights. It uses no code from the package."""

import math
from collections.abc import Callable

import torch
from attention.inputs import Case, Inputs, Tensors
from torch import Tensor, nn


def scaled(x: Tensor, tensors: Tensors, name: str) -> Tensor:
    return x * tensors[f"{name}.scale"] + tensors[f"{name}.offset"]


def bias_by_distance(bias: Tensor, length: int) -> Tensor:
    """Return a matrix with b[|t - j|] at [t, j]."""
    distances = torch.arange(length).unsqueeze(1) - torch.arange(length)
    return bias[distances.abs()]


def squared_relu(x: Tensor) -> Tensor:
    return x.clamp(min=0) ** 2


def laplace(x: Tensor) -> Tensor:
    mu, sigma = math.sqrt(1 / 2), math.sqrt(1 / (4 * math.pi))
    return (1 + torch.erf((x - mu) / (sigma * math.sqrt(2)))) / 2


def gau(x: Inputs, tensors: Tensors, by_length: bool, activation: str, causal: bool = True) -> Tensor:
    positions = 784
    q, k = scaled(x.k, tensors, "query"), scaled(x.k, tensors, "key")
    activate = laplace if activation == "laplace" else squared_relu
    products = q @ k.transpose(-1, -2)
    if by_length:
        weights = activate(products / positions + bias_by_distance(tensors["bias"], x.v.shape[2]))
    else:
        weights = activate(products / math.sqrt(q.shape[-1])) / positions
    return (weights.tril() if causal else weights) @ x.v


def fill_parameters(size: float) -> Callable[[nn.Module], None]:
    """Make scales, offsets and biases large enough to affect the result.

    Products of queries and keys are proportional to `size`. The scales of queries and keys have the same sign, so most
    positions attend to themselves. ReLU sets about half of the other weights to zero.
    """

    def fill(mechanism: nn.Module) -> None:
        generator = torch.Generator().manual_seed(4)
        for name, parameter in mechanism.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            if name == "bias":
                parameter.data = 0.3 * noise
                parameter.data[0] = 0.4
            elif name.endswith("scale"):
                parameter.data = size**0.5 * (0.7 + 0.3 * noise.abs())
            else:
                parameter.data = 0.3 * size**0.5 * noise

    return fill


def gau_case(scale: str, activation: str) -> Case:
    by_length = scale == "length"
    return Case(
        "gau",
        {"scale": scale, "activation": activation},
        lambda x, tensors: gau(x, tensors, by_length, activation),
        heads=1,
        prepare=fill_parameters(784 if by_length else 28),
        keeps_pairs="always",
        oracle_all=lambda x, tensors: gau(x, tensors, by_length, activation, causal=False),
    )


CASES = {
    f"gau-{scale}-{activation}": gau_case(scale, activation)
    for scale in ("length", "width")
    for activation in ("relu2", "laplace")
}
