"""Random feature attention (Peng 2021, arXiv 2103.02143): random Fourier features with a gate."""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from .base import AttentionOptions, AttentionShape, Chunk, Gates, MixInputs, Out, SumAttention, setting
from .parts.random_features import WEIGHT_FLOOR, divide_by_floored_weight, draw_directions, sine_features
from .parts.sums import causal_sums, decayed_causal_sums, divide_by_weight, read_whole_sums, update_and_read
from .tensors import accumulator_dtype

# With a larger logit, 1 - g and the sums of open gates would underflow in float32, or overflow as a gradient.
_LARGEST_LOGIT = 64.0


class RfaOptions(AttentionOptions):
    gate: bool = setting(True, "decay the weight of older positions by a gate computed from the input")
    frequencies: int | None = setting(None, "D, number of directions, each a sine and a cosine (default: 2 K)", gt=0)
    chunk: Chunk = 64


class RfaState(NamedTuple):
    """s [B, H, 2 D, V + 1], the sum of phi(k_j) [v_j, 1]^T, whose last column is z, and n [B, H], the keys' weight."""

    s: Tensor
    n: Tensor


class RfaAttention(SumAttention[RfaOptions, RfaState]):
    """y_t = phi(q_t) s_t / max(phi(q_t) . z_t, 0.1 n_t), phi(x) = [sin(w_i . x), cos(w_i . x)] / sqrt(D), i = 1 .. D.

    Queries and keys are scaled to length 1 first. w_i = sigma * e_i, where e_i ~ N(0, I) is fixed and sigma is learned
    for each head and dimension, so phi(q) . phi(k) estimates exp(-|sigma * (q - k)|^2 / 2). Without the gate, s_t, z_t
    and n_t are the sums of phi(k_j) v_j^T, phi(k_j) and 1. With the gate, g_t is the sigmoid of the head's extra
    scalar, of which at most 64 counts, and s_t, z_t and n_t are updated as in

        s_t = g_t s_{t-1} + (1 - g_t) phi(k_t) v_t^T

    This is section 3 of the source, except for the denominator. The largest possible value of phi(q_t) . z_t is n_t.
    Our denominator is at least a tenth of n_t, because sums of sines and cosines can be 0 or negative.

    The bidirectional form has s, z and n of all positions, and no gate, as in the source.
    """

    name = "rfa"
    source = "Peng 2021, arXiv 2103.02143"
    method = "random Fourier features, gated running sums"
    bidirectional = True
    # With a bias of 5, the gate initially remembers about 150 positions. With 2, models learn less well.
    extra_bias = 5.0
    directions: Tensor

    def __init__(self, options: RfaOptions, shape: AttentionShape) -> None:
        super().__init__(options, shape)
        self.frequencies = options.frequencies or 2 * shape.key_width
        self.gates = {"forget": 1} if options.gate else {}
        self.bidirectional = not options.gate
        self.sigma = nn.Parameter(torch.ones(shape.heads, shape.key_width))
        # e [D, K], the same for all heads.
        self.register_buffer("directions", draw_directions(self.frequencies, shape.key_width, orthogonal=False))

    def _features(self, x: Tensor, sigma: Tensor) -> Tensor:
        """Return phi(x) [..., 2 D] for x [..., K]; `sigma` broadcasts with x."""
        scaled = functional.normalize(x, dim=-1) * sigma.to(x.dtype)
        return sine_features(scaled @ self.directions.to(x.dtype).transpose(0, 1))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, state: RfaState | None, gates: Gates) -> Out[RfaState]:
        dtype, sigma = accumulator_dtype(q.dtype), self.sigma.unsqueeze(1)
        phi_q, phi_k = self._features(q.to(dtype), sigma), self._features(k.to(dtype), sigma)
        # With a column of ones appended to the values, the last column of s is z.
        values = functional.pad(v.to(dtype), (0, 1), value=1.0)
        s, n = (None, None) if state is None else state
        if self.options.gate:
            gate = gates["forget"].squeeze(-1).clamp(max=_LARGEST_LOGIT)
            log_gate = functional.logsigmoid(gate)
            values = values * (-gate).sigmoid().unsqueeze(-1)
            sums, s = decayed_causal_sums(phi_q, phi_k, values, log_gate, s, self.options.chunk)
            # n_t = 1 - p + n_0 p, where p is the product of the gates up to t and n_0 is the state's n.
            log_kept = log_gate.cumsum(dim=-1)
            weight = -log_kept.expm1()
            if n is not None:
                weight = weight + n.unsqueeze(-1) * log_kept.exp()
        else:
            sums, s = causal_sums(phi_q, phi_k, values, s, self.options.chunk)
            weight = torch.arange(1, v.shape[2] + 1, device=v.device, dtype=dtype).expand(v.shape[:3])
            weight = weight if n is None else weight + n.unsqueeze(-1)
        return divide_by_floored_weight(sums, weight), RfaState(s, weight[..., -1].clone())

    def _attend_all(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None, gates: Gates) -> Tensor:
        dtype, sigma = accumulator_dtype(q.dtype), self.sigma.unsqueeze(1)
        phi_q, phi_k = self._features(q.to(dtype), sigma), self._features(k.to(dtype), sigma)
        sums, weight = read_whole_sums(phi_q, phi_k, v.to(dtype), lengths)
        count = weight.new_tensor(q.shape[2]) if lengths is None else lengths.to(dtype).view(-1, 1, 1)
        return divide_by_weight(sums, torch.maximum(weight, WEIGHT_FLOOR * count))

    def init_state(self, batch: int, capacity: int, device: torch.device, dtype: torch.dtype) -> RfaState:
        heads, dtype = self.shape.heads, accumulator_dtype(dtype)
        s = torch.zeros(batch, heads, 2 * self.frequencies, self.shape.value_width + 1, device=device, dtype=dtype)
        return RfaState(s, s.new_zeros(batch, heads))

    def _step(self, q_t: Tensor, k_t: Tensor, v_t: Tensor, state: RfaState, gates_t: Gates) -> Out[RfaState]:
        s, n = state
        phi_q, phi_k = self._features(torch.stack([q_t, k_t]).to(n.dtype), self.sigma)
        values = functional.pad(v_t.to(n.dtype), (0, 1), value=1.0)
        kept = None
        if self.options.gate:
            gate = gates_t["forget"].clamp(max=_LARGEST_LOGIT)
            kept, added = gate.sigmoid(), (-gate).sigmoid()
            values *= added
            n.mul_(kept.squeeze(-1)).add_(added.squeeze(-1))
        else:
            n.add_(1)
        return divide_by_floored_weight(update_and_read(s, phi_q, phi_k, values, kept), n), state

    def emit(self, inputs: MixInputs) -> None:
        builder, features = inputs.builder, 2 * self.frequencies
        inputs.emit(
            "rfa",
            s=inputs.state(features * self.shape.value_width),
            z=inputs.state(features),
            n=inputs.state(1),
            sigma=builder.shared(self.sigma),
            directions=builder.shared(self.directions.transpose(0, 1)),
            C=features,
            gated=self.options.gate,
        )

    def list_states(self, state: RfaState) -> list[Tensor]:
        s, n = state
        return [s[..., :-1], s[..., -1], n]
