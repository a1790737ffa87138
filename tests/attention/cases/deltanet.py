"""Reference for the gated delta rule, computed by the recurrence of its state. It uses no code from the package."""

import functools

import torch
from attention.inputs import Case, Inputs, Tensors
from torch import Tensor, nn


def direction(x: Tensor) -> Tensor:
    x = x * x.sigmoid()
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def recurrence(x: Inputs, tensors: Tensors, gate: bool, largest_beta: float, causal: bool = True) -> Tensor:
    """Compute y = q s / rms(q s); without `causal`, q s of the reversed sequence is added before the norm."""
    y = read_states(x, tensors, gate, largest_beta)
    if not causal:
        y = y + read_states(x.map(lambda part: part.flip(2)), tensors, gate, largest_beta).flip(2)
    return y / (y.square().mean(-1, keepdim=True) + 1e-5).sqrt()


def read_states(x: Inputs, tensors: Tensors, gate: bool, largest_beta: float) -> Tensor:
    """Compute s = alpha (I - beta k k^T) s + beta k v^T and q s, position by position."""
    q, k = direction(x.q), direction(x.k)
    beta = largest_beta * x.extra[..., 0].sigmoid()
    alpha = (x.extra[..., 1] + tensors["gate_bias"].unsqueeze(1)).sigmoid() if gate else torch.ones_like(beta)
    identity = torch.eye(k.shape[-1], dtype=k.dtype)
    s, outputs = torch.zeros_like(k[:, :, 0].unsqueeze(-1) * x.v[:, :, 0].unsqueeze(-2)), []
    for t in range(k.shape[2]):
        alpha_t, beta_t = alpha[:, :, t, None, None], beta[:, :, t, None, None]
        column, row = k[:, :, t].unsqueeze(-1), x.v[:, :, t].unsqueeze(-2)
        s = alpha_t * (identity - beta_t * column * column.transpose(-1, -2)) @ s + beta_t * column * row
        outputs.append((q[:, :, t].unsqueeze(-2) @ s).squeeze(-2))
    return torch.stack(outputs, dim=2)


def half_open(mechanism: nn.Module) -> None:
    """Open the gates halfway; nearly open gates would have too little effect to test."""
    mechanism.gate_bias.data = torch.tensor([1.0, -0.5], dtype=torch.float64)


def deltanet_case(gate: bool, negative: bool) -> Case:
    oracle = functools.partial(recurrence, gate=gate, largest_beta=2.0 if negative else 1.0)
    return Case(
        "deltanet",
        {"gate": gate, "negative_eigenvalues": negative, "chunk": 16},
        oracle,
        oracle_all=functools.partial(oracle, causal=False),
        prepare=half_open if gate and not negative else None,
    )


CASES = {
    "deltanet-gated": deltanet_case(gate=True, negative=False),
    "deltanet-ungated": deltanet_case(gate=False, negative=False),
    "deltanet-negative": deltanet_case(gate=True, negative=True),
}
