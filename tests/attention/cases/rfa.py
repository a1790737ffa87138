"""Reference for random feature attention, computed with T x T weights. It uses no code from the package."""

import torch
from attention.inputs import Case, Inputs, Tensors
from torch import Tensor


def kernel(x: Inputs, tensors: Tensors) -> Tensor:
    """Return the mean over directions e of cos(sigma e . (q_t - k_j)), [B, H, T, T]; q and k are scaled to length 1."""
    w = tensors["sigma"].unsqueeze(1) * tensors["directions"]  # [H, D, K]
    q, k = (torch.einsum("hdk,bhtk->bhtd", w, part / part.norm(dim=-1, keepdim=True)) for part in (x.q, x.k))
    return (q.unsqueeze(3) - k.unsqueeze(2)).cos().mean(-1)


def average(weights: Tensor, similar: Tensor, v: Tensor) -> Tensor:
    """Average v with weights [.., T, T] times similarity; the denominator is at least a tenth of the total weight."""
    denominator = torch.maximum((weights * similar).sum(-1), 0.1 * weights.sum(-1))
    return (weights * similar) @ v / denominator.unsqueeze(-1)


def ungated(x: Inputs, tensors: Tensors, causal: bool = True) -> Tensor:
    similar = kernel(x, tensors)
    return average(torch.ones_like(similar).tril() if causal else torch.ones_like(similar), similar, x.v)


def gated(x: Inputs, tensors: Tensors) -> Tensor:
    """Weight position j by (1 - g_j) times the gates of positions j + 1 to t."""
    gate = x.extra[..., 0].sigmoid()
    length = gate.shape[-1]
    columns = []
    for j in range(length):
        fading = torch.cat([1 - gate[..., j : j + 1], gate[..., j + 1 :]], dim=-1).cumprod(dim=-1)
        columns.append(torch.cat([torch.zeros_like(gate[..., :j]), fading], dim=-1))
    return average(torch.stack(columns, dim=-1), kernel(x, tensors), x.v)


CASES = {
    "rfa-gated": Case("rfa", {"gate": True, "chunk": 16}, gated),
    "rfa-ungated": Case(
        "rfa",
        {"gate": False, "chunk": 16, "frequencies": 9},
        ungated,
        oracle_all=lambda x, tensors: ungated(x, tensors, causal=False),
    ),
}
