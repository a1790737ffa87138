"""Reference for mixed-chunk attention, computed with T x T weights. It uses no code from the package."""

import math

import torch
from attention.cases.gau import bias_by_distance, fill_parameters, scaled, squared_relu
from attention.inputs import Case, Inputs, Tensors
from torch import Tensor

CHUNK = 16


def flash(x: Inputs, tensors: Tensors, by_length: bool, causal: bool = True) -> Tensor:
    """Without `causal`, the linear part covers all positions and is divided by their number, not by `CHUNK`."""
    names = ("query", "key", "linear_query", "linear_key")
    q, k, linear_q, linear_k = (scaled(x.k, tensors, name) for name in names)
    products, linear_products = q @ k.transpose(-1, -2), linear_q @ linear_k.transpose(-1, -2)
    chunk = torch.arange(x.v.shape[2]) // CHUNK
    same, earlier = chunk.unsqueeze(1) == chunk, chunk.unsqueeze(1) > chunk
    if by_length:
        # Distances inside a chunk are below C, so the bias at larger distances is not used.
        bias = torch.cat([tensors["bias"], torch.zeros(x.v.shape[2], dtype=x.v.dtype)])
        inside = squared_relu(products / CHUNK + bias_by_distance(bias, x.v.shape[2]))
        across = linear_products / CHUNK
    else:
        width = math.sqrt(q.shape[-1])
        inside = squared_relu(products / width) / CHUNK
        across = linear_products / (CHUNK * width)
    if not causal:
        return (inside * same + across * CHUNK / len(chunk)) @ x.v
    return ((inside * same).tril() + across * earlier) @ x.v


def flash_case(scale: str) -> Case:
    by_length = scale == "length"
    return Case(
        "flash",
        {"scale": scale, "chunk": CHUNK},
        lambda x, tensors: flash(x, tensors, by_length),
        heads=1,
        prepare=fill_parameters(CHUNK if by_length else 6),
        oracle_all=lambda x, tensors: flash(x, tensors, by_length, causal=False),
    )


CASES = {f"flash-{scale}": flash_case(scale) for scale in ("length", "width")}
