"""RWKV-7 (Peng 2025, "Goose", arXiv 2503.14456): a delta rule that removes one key and adds another."""

import math

import torch
from torch import Tensor, nn

from .base import AttentionOptions, AttentionShape, Gates, MixInputs, setting
from .parts.chunks import PowerOfTwoChunk
from .parts.delta_rule import DeltaAttention, DeltaInputs, Updates
from .parts.memory_lengths import log_memories
from .parts.scaling import directions

_FASTEST = math.exp(-0.5)  # the fastest decay is exp(-e^-0.5) = 0.545 per position


class Rwkv7Options(AttentionOptions):
    bonus: bool = setting(True, "add the value of the position itself, with a weight of its own")
    chunk: PowerOfTwoChunk = 16


class Rwkv7Attention(DeltaAttention[Rwkv7Options]):
    """y_t = q_t s_t / rms(q_t s_t) + (q_t . (rho * c_t)) v_t, with a state s_t that removes one key and adds another:

        s_t = (diag(w_t) - (a_t * kappa_t) kappa_t^T) s_{t-1} + c_t v_t^T

    w_t = exp(-e^-0.5 sigmoid(x_t + b)) is the decay, and a_t = sigmoid(z_t + d) is the in-context learning rate. x_t
    and z_t are extra scalars, each with K numbers. The removal key kappa_t is k_t * xi, scaled to length 1. The
    replacement key is c_t = k_t * (1 + (a_t - 1) * alpha). b, d, xi, alpha and rho are learned, each [H, K].

    This is section 4 of the source, where q is called r and c is called k~. Unlike the source's layer, ours has no
    token shift, no value residual and no output gate. It projects x and z without a bottleneck, and it divides by the
    root mean square, without weights, where the source has a group norm.
    """

    name = "rwkv7"
    source = "Peng 2025, arXiv 2503.14456"
    method = "delta rule, separate removal and replacement keys"
    updates_per_position = 2

    def __init__(self, options: Rwkv7Options, shape: AttentionShape) -> None:
        super().__init__(options, shape, chunk=2 * options.chunk)
        self.gates = {"decay": shape.key_width, "rate": shape.key_width}
        # Initially, the memory lengths m of the rows of s range from an image down to an image row: w = exp(-1 / m).
        opening = (-log_memories(shape, shape.key_width, least=2)).exp() / _FASTEST
        sizes = shape.heads, shape.key_width
        self.decay_bias = nn.Parameter(opening.logit().repeat(shape.heads, 1))
        self.rate_bias = nn.Parameter(torch.zeros(sizes))
        self.removal = nn.Parameter(torch.ones(sizes))  # xi
        self.replacement = nn.Parameter(torch.ones(sizes))  # alpha
        self.bonus = nn.Parameter(torch.zeros(sizes)) if options.bonus else None  # rho

    def prepare(self, q: Tensor, k: Tensor, v: Tensor, gates: Gates) -> DeltaInputs:
        """Return the inputs of two updates of a position: one removes what s holds for kappa, the other adds c v^T.

        The first also decays s, and reads the decayed s, so it reads with kappa / w, where w is at least 0.545.
        """
        learned = (self.decay_bias, self.rate_bias, self.removal, self.replacement)
        decay_bias, rate_bias, removal, replacement = (x.to(v.dtype).unsqueeze(-2) for x in learned)
        log_w = -_FASTEST * (gates["decay"] + decay_bias).sigmoid()
        rate = (gates["rate"] + rate_bias).sigmoid()
        kappa = directions(k * removal)
        added = k * (1 + (rate - 1) * replacement)
        none = torch.zeros_like(k)
        updates = Updates(
            k=_alternate(rate * kappa, added),
            v=_alternate(torch.zeros_like(v), v),
            beta=v.new_ones(1, 1, 2 * v.shape[2], 1),
            log_a=_alternate(log_w, none),
            d=_alternate(kappa * (-log_w).exp(), none),
        )
        bonus = None
        if self.bonus is not None:
            bonus = (q * added * self.bonus.to(v.dtype).unsqueeze(-2)).sum(dim=-1, keepdim=True) * v
        return DeltaInputs(_alternate(none, q), updates, bonus)

    def emit(self, inputs: MixInputs) -> None:
        bonus = torch.zeros_like(self.removal) if self.bonus is None else self.bonus
        parameters = (self.decay_bias, self.rate_bias, self.removal, self.replacement, bonus)
        state = inputs.state(self.shape.key_width * self.shape.value_width)
        inputs.emit("rwkv7", state=state, parameters=inputs.builder.shared(torch.stack(parameters, dim=1)))


def _alternate(first: Tensor, second: Tensor) -> Tensor:
    """Two tensors [B, H, T, N] as one [B, H, 2 T, N], with the two parts of a position side by side."""
    return torch.stack([first, second], dim=3).flatten(2, 3)
