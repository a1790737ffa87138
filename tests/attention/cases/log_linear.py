"""Reference for log-linear attention, with the level of every pair of positions. It uses no code from the package."""

import torch
from attention.inputs import Case, Inputs, Tensors
from torch import Tensor, nn


def softplus(x: Tensor) -> Tensor:
    return (1 + x.exp()).log()


def direction(x: Tensor) -> Tensor:
    x = x * x.sigmoid()
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def weigh_levels(pairs: Tensor, scales: Tensor) -> Tensor:
    """Multiply pairs [B, H, T, T] by the weight of their level.

    The level of two positions is the number of bits up to the highest one in which they differ.
    """
    length = pairs.shape[-1]
    levels = torch.tensor([[(t ^ j).bit_length() if j <= t else 0 for j in range(length)] for t in range(length)])
    return pairs * scales.gather(-1, levels.expand_as(pairs)).tril()


def follow(q: Tensor, k: Tensor, alpha: Tensor, beta: Tensor) -> Tensor:
    """Compute the pairs q_t . x_tj, where x_jj = k_j and x_tj = alpha_t (I - beta_t k_t k_t^T) x_(t-1)j."""
    length = q.shape[2]
    keys, rows = k[:, :, :0], []
    for t in range(length):
        k_t = k[:, :, t : t + 1]
        keys = alpha[:, :, t, None, None] * (
            keys - beta[:, :, t, None, None] * (keys * k_t).sum(-1, keepdim=True) * k_t
        )
        keys = torch.cat([keys, k_t], dim=2)
        row = (q[:, :, t : t + 1] * keys).sum(-1)
        rows.append(torch.nn.functional.pad(row, (0, length - t - 1)))
    return torch.stack(rows, dim=2)


def root_mean_square(y: Tensor) -> Tensor:
    return (y.square().mean(-1, keepdim=True) + 1e-6).sqrt()


def linear(x: Inputs, _: Tensors) -> Tensor:
    q, k = (torch.where(part > 0, part + 1, part.clamp(max=0).exp()) for part in (x.q, x.k))
    weights = weigh_levels(q @ k.transpose(-1, -2), softplus(x.extra))
    return weights @ x.v / weights.sum(-1, keepdim=True)


def mamba2(x: Inputs, tensors: Tensors) -> Tensor:
    dt = softplus(x.extra[..., 0] + tensors["dt_bias"].unsqueeze(1))
    alpha = (-tensors["a_log"].exp().unsqueeze(1) * dt).exp()
    pairs = follow(x.q, x.k, alpha, torch.zeros_like(alpha))
    y = weigh_levels(pairs, softplus(x.extra[..., 1:])) @ (dt.unsqueeze(-1) * x.v)
    return y / root_mean_square(y)


def deltanet(x: Inputs, tensors: Tensors) -> Tensor:
    beta, alpha = x.extra[..., 0].sigmoid(), (x.extra[..., 1] + tensors["gate_bias"].unsqueeze(1)).sigmoid()
    pairs = follow(direction(x.q), direction(x.k), alpha, beta)
    y = weigh_levels(pairs, softplus(x.extra[..., 2:])) @ (beta.unsqueeze(-1) * x.v)
    return y / root_mean_square(y)


def decay_faster(mechanism: nn.Module) -> None:
    """Let states decay within a few positions; a slower decay would have too little effect to test."""
    tensors = dict(mechanism.named_parameters())
    for name, values in {"dt_bias": (-2.0, -1.0), "a_log": (0.3, -0.4), "gate_bias": (1.0, -0.5)}.items():
        if name in tensors:
            tensors[name].data = torch.tensor(values, dtype=torch.float64)


CASES = {
    "log_linear-linear": Case("log_linear", {"over": "linear", "chunk": 16}, linear),
    "log_linear-mamba2": Case("log_linear", {"over": "mamba2", "chunk": 16}, mamba2, prepare=decay_faster),
    "log_linear-deltanet": Case("log_linear", {"over": "deltanet", "chunk": 8}, deltanet, prepare=decay_faster),
}
