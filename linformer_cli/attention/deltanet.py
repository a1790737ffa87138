"""Gated DeltaNet (Yang 2024, arXiv 2412.06464): the state decays, and a new value replaces the key's old value."""

import torch
from torch import Tensor

from .base import AttentionShape, Gates, setting
from .parts.delta_rule import GatedDeltaAttention, GatedDeltaOptions, delta_sums, finish
from .parts.sums import sum_both_ways
from .tensors import accumulator_dtype


class DeltanetOptions(GatedDeltaOptions):
    gate: bool = setting(True, "decay the state by a gate computed from the input")


class DeltanetAttention(GatedDeltaAttention[DeltanetOptions]):
    """y_t = q_t s_t / rms(q_t s_t), where s_t = alpha_t (I - beta_t k_t k_t^T) s_{t-1} + beta_t k_t v_t^T.

    Queries and keys are silu(q) and silu(k), scaled to length 1. The bracket removes the fraction beta_t of the value
    that the state holds for the key. The last term adds as much of the new value. beta_t is the sigmoid of the head's
    first extra scalar. alpha_t = sigmoid(x + b) is a gate that decays the whole state. x is the second extra scalar,
    and b is learned for each head. With `gate = false`, alpha_t is 1, which gives the DeltaNet of Yang 2024, arXiv
    2406.06484. With `negative_eigenvalues`, beta_t is twice the sigmoid (Grazzi 2024, arXiv 2411.12537).

    This is section 3 of the source, with a different form of alpha. The source's layer also has a short convolution of
    queries, keys and values, weights in the norm, and an output gate. The network settings `short_convolution`,
    `norm_heads` and `output_gate` add them.

    The source has no bidirectional form. Here, q_t s_t is the sum of both directions, and y_t is the normalised sum.
    The two states start at the two ends of the sequence, and both contain the update of position t.
    """

    name = "deltanet"
    source = "Yang 2024, arXiv 2412.06464"
    method = "delta rule, gated, triangular solves in chunks"
    bidirectional = True

    def __init__(self, options: DeltanetOptions, shape: AttentionShape) -> None:
        super().__init__(options, shape, {"erase": 1, "write": 0, "decay": int(options.gate)})

    def _attend_all(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None, gates: Gates) -> Tensor:
        dtype = accumulator_dtype(q.dtype)

        def run(q: Tensor, k: Tensor, v: Tensor, extra: Tensor) -> Tensor:
            x = self.prepare(q, k, v, self.name_gates(extra, dtype))
            return delta_sums(x.q, x.updates, None, self.chunk)[0]

        extra = torch.cat(list(gates.values()), dim=-1)
        both = sum_both_ways(run, *(x.to(dtype) for x in (q, k, v)), extra)
        return finish(both, None)
