"""Reference for mLSTM, computed by the recurrence of its state without a stabiliser. It uses no code from the package.

In float64, exp of an input gate overflows only above 709.
"""

import functools
import math

import torch
from attention.inputs import Case, Inputs, Tensors
from torch import Tensor, nn


def recurrence(x: Inputs, tensors: Tensors, exponential: bool, normalised: bool) -> Tensor:
    """Compute C = f C + i k v^T, n = f n + i k and h = C^T q / max(|n . q|, 1), position by position.

    The outputs are h, divided by its root mean square if `normalised`.
    """
    i, z = x.extra[..., 0].exp(), x.extra[..., 1] + tensors["gate_bias"].unsqueeze(1)
    f = z.exp() if exponential else z.sigmoid()
    k = x.k / math.sqrt(x.k.shape[-1])
    n, outputs = torch.zeros_like(k[:, :, 0]), []
    c = n.unsqueeze(-1) * x.v[:, :, 0].unsqueeze(-2)
    for t in range(k.shape[2]):
        f_t, ik = f[:, :, t].unsqueeze(-1), i[:, :, t].unsqueeze(-1) * k[:, :, t]
        c = f_t.unsqueeze(-1) * c + ik.unsqueeze(-1) * x.v[:, :, t].unsqueeze(-2)
        n = f_t * n + ik
        q = x.q[:, :, t]
        weight = (n * q).sum(-1, keepdim=True).abs().clamp(min=1)
        outputs.append((q.unsqueeze(-2) @ c).squeeze(-2) / weight)
    h = torch.stack(outputs, dim=2)
    return h / (h.square().mean(-1, keepdim=True) + 1e-5).sqrt() if normalised else h


def mlstm_case(forget_gate: str, biases: list[float], normalise: bool) -> Case:
    def shorten(mechanism: nn.Module) -> None:
        """Shorten the memories; nearly open gates would have too little effect to test."""
        mechanism.gate_bias.data = torch.tensor(biases, dtype=torch.float64)

    oracle = functools.partial(recurrence, exponential=forget_gate == "exponential", normalised=normalise)
    options = {"chunk": 16, "forget_gate": forget_gate, "normalise": normalise}
    return Case("mlstm", options, oracle, prepare=shorten)


CASES = {
    "mlstm": mlstm_case("sigmoid", [1.0, -0.5], normalise=True),
    # With larger biases, n would grow without bound, and n . q would lose its digits by cancellation.
    "mlstm-exponential": mlstm_case("exponential", [-0.5, -1.5], normalise=False),
}
