"""Reference for Transformer-LS: every query scores every position and every row. It uses no code from the package."""

import math

import torch
from attention.inputs import Case, Inputs, Tensors
from torch import Tensor


def joint_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Apply LayerNorm to x [B, H, T, W] over H and W together; weight and bias are [H, at least W]."""
    mean = x.mean(dim=(1, 3), keepdim=True)
    variance = ((x - mean) ** 2).mean(dim=(1, 3), keepdim=True)
    width = x.shape[-1]
    return (x - mean) / (variance + 1e-5).sqrt() * weight[:, None, :width] + bias[:, None, :width]


def long_short(x: Inputs, tensors: Tensors, chunk: int, window: int) -> Tensor:
    window_norm, row_norm = (
        (tensors[f"{name}.weight"], tensors[f"{name}.bias"]) for name in ("window_norm", "row_norm")
    )
    place = torch.arange(x.v.shape[2])
    keys, values = [joint_norm(x.k, *window_norm)], [joint_norm(x.v, *window_norm)]
    visible = [(place <= place[:, None]) & (place > place[:, None] - window)]
    for index in range(len(place) // chunk):
        own = slice(index * chunk, (index + 1) * chunk)
        weights = x.extra[:, :, own].softmax(dim=2).transpose(-1, -2)
        keys.append(joint_norm(weights @ x.k[:, :, own], *row_norm))
        values.append(joint_norm(weights @ x.v[:, :, own], *row_norm))
        visible.append((place >= own.stop)[:, None].expand(-1, x.extra.shape[-1]))
    scores = x.q @ torch.cat(keys, dim=2).transpose(-1, -2) / math.sqrt(x.q.shape[-1])
    weights = scores.masked_fill(~torch.cat(visible, dim=1), -math.inf).softmax(dim=-1)
    return weights @ torch.cat(values, dim=2)


def long_short_all(x: Inputs, tensors: Tensors, window: int) -> Tensor:
    """See the own segment, half a segment on each side, and the rows of the whole sequence."""
    place, shares = torch.arange(x.v.shape[2]), x.extra.softmax(dim=2).transpose(-1, -2)
    parts = []
    for part in (x.k, x.v):
        near = joint_norm(part, tensors["window_norm.weight"], tensors["window_norm.bias"])
        rows = joint_norm(shares @ part, tensors["row_norm.weight"], tensors["row_norm.bias"])
        parts.append(torch.cat([near, rows], dim=2))
    start = (place // window * window).unsqueeze(1)
    seen = (place >= start - window // 2) & (place < start + window + window // 2)
    visible = torch.cat([seen, torch.ones(len(place), x.extra.shape[-1], dtype=torch.bool)], dim=1)
    scores = x.q @ parts[0].transpose(-1, -2) / math.sqrt(x.q.shape[-1])
    return scores.masked_fill(~visible, -math.inf).softmax(dim=-1) @ parts[1]


def long_short_case(chunk: int, rank: int, window: int) -> Case:
    options = {"chunk": chunk, "rank": rank, "window": window}
    return Case(
        "long_short",
        options,
        lambda x, tensors: long_short(x, tensors, chunk, window),
        oracle_all=lambda x, tensors: long_short_all(x, tensors, window),
    )


CASES = {
    "long_short": long_short_case(16, 1, 20),
    "long_short-ranks": long_short_case(9, 3, 9),
    "long_short-short-window": long_short_case(7, 2, 2),
    "long_short-long-window": long_short_case(4, 1, 40),
}
