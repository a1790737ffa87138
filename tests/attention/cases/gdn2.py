"""Reference for Gated DeltaNet-2, computed by the recurrence of its state. It uses no code from the package."""

import functools

import torch
from attention.inputs import Case, Inputs, Tensors
from torch import Tensor, nn


def direction(x: Tensor) -> Tensor:
    x = x * x.sigmoid()
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def recurrence(x: Inputs, tensors: Tensors, decay: str, erase: str, write: str, largest_erase: float) -> Tensor:
    """Compute s = (I - k (b * k)^T) diag(a) s + k (w * v)^T and y = q s / rms(q s), position by position."""
    q, k, v = direction(x.q), direction(x.k), x.v
    keys, values = k.shape[-1], v.shape[-1]
    sizes = [keys if erase == "channel" else 1, {"channel": values, "head": 1, "tied": 0}[write]]
    b, w, gate = (x.extra[..., : sizes[0]], x.extra[..., sizes[0] : sum(sizes)], x.extra[..., sum(sizes) :])
    b = largest_erase * b.sigmoid().expand(k.shape)
    w = b[..., :1] if write == "tied" else w.sigmoid()
    if decay == "none":
        a = torch.ones_like(k)
    else:
        bias = tensors["gate_bias"].reshape(k.shape[1], 1, -1)
        a = 1 / (1 + (-gate - bias).exp()) * torch.ones_like(k)
    identity = torch.eye(keys, dtype=k.dtype)
    s, outputs = k.new_zeros(*k.shape[:2], keys, values), []
    for t in range(k.shape[2]):
        key, erased = k[:, :, t].unsqueeze(-1), (b * k)[:, :, t].unsqueeze(-2)
        s = (identity - key @ erased) @ (a[:, :, t].unsqueeze(-1) * s) + key @ (w * v)[:, :, t].unsqueeze(-2)
        outputs.append((q[:, :, t].unsqueeze(-2) @ s).squeeze(-2))
    y = torch.stack(outputs, dim=2)
    return y / (y.square().mean(-1, keepdim=True) + 1e-5).sqrt()


def half_open(mechanism: nn.Module) -> None:
    """Open the gates halfway; nearly open gates would have too little effect to test."""
    bias = mechanism.gate_bias.data
    mechanism.gate_bias.data = torch.linspace(2, -1, bias.numel(), dtype=bias.dtype).view_as(bias)


def gdn2_case(decay: str, erase: str, write: str, negative: bool = False) -> Case:
    options = {"decay": decay, "erase": erase, "write": write, "negative_eigenvalues": negative, "chunk": 16}
    oracle = functools.partial(
        recurrence, decay=decay, erase=erase, write=write, largest_erase=2.0 if negative else 1.0
    )
    return Case("gdn2", options, oracle, prepare=None if decay == "none" else half_open)


CASES = {
    "gdn2": gdn2_case("channel", "channel", "channel"),
    "gdn2-kda": gdn2_case("channel", "head", "tied", negative=True),
    "gdn2-none": gdn2_case("none", "channel", "head"),
    "gdn2-head": gdn2_case("head", "head", "channel"),
}
