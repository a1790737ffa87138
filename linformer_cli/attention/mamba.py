"""Mamba-3 (Lahoti 2026, arXiv 2603.15569): a state space model as running sums; with its options off, Mamba-2."""

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from linformer_cli.native.program import NO_BUFFER, MixInputs
from .base import AttentionOptions, AttentionShape, Chunk, Gates, Out, SumAttention, as_sequence, setting
from .parts.memory_lengths import inverse_softplus, log_memories
from .parts.scaling import shrink_huge
from .parts.sums import decayed_causal_sums, sum_logs, update_and_read
from .tensors import accumulator_dtype

_EPSILON = 1e-5  # added to the mean squares of queries and keys
_SLOWEST_RATE = 1e-4  # the smallest -A computed from the input


class MambaOptions(AttentionOptions):
    trapezoidal: bool = setting(True, "add each input in two parts: at its own position and at the next one")
    rotation: bool = setting(True, "rotate queries and keys by angles that add up from position to position")
    normalise: bool = setting(True, "divide queries and keys by their root mean square, then add a learned bias")
    rate: Literal["input", "head"] = setting("input", "A, the rate of decay: from the input, or learned for each head")
    chunk: Chunk = 64


class Newest(NamedTuple):
    """The newest position's key [B, H, K], value [B, H, V] and weight lambda Delta [B, H, 1]."""

    key: Tensor
    value: Tensor
    weight: Tensor


class MambaState(NamedTuple):
    """s [B, H, K, V], the decayed sum of keys times values; angles [B, H, R] in turns; and the newest position.

    With the trapezoidal rule, s leaves out the term of the newest position. What an option does not need is None.
    """

    s: Tensor
    angle: Tensor | None
    newest: Newest | None


class _Steps(NamedTuple):
    """Delta, log alpha and lambda [B, H, T] of T positions, and the changes of the angles [B, H, T, R] in turns."""

    size: Tensor
    log_decay: Tensor
    share: Tensor | None
    turns: Tensor | None


class MambaAttention(SumAttention[MambaOptions, MambaState]):
    """y_t = C_t h_t + D x_t, with h_t = alpha_t h_{t-1} + beta_t B_{t-1} x_{t-1}^T + gamma_t B_t x_t^T.

    C, B and x are the queries, keys and values. The step size Delta_t = softplus(d_t + b) is computed from the input.
    The state decays by alpha_t = exp(Delta_t A_t). An input is added with the weights of a trapezoidal rule:
    gamma_t = lambda_t Delta_t at its own position and beta_t = (1 - lambda_t) Delta_t alpha_t at the next position,
    where lambda_t = sigmoid(l_t). Without `trapezoidal`, lambda_t is 1.

    B_t and C_t are divided by their root mean square, multiplied by a learned gain, and shifted by a learned bias. Then
    the first 2 R coordinates, in pairs, are rotated by the angles of position t. Every position adds
    pi tanh(w_t) Delta_t to the R angles. A state of R complex numbers and K - 2 R real numbers per value dimension
    would give the same outputs.

    A_t = -max(f(a_t), 1e-4), where f(x) is 1 + x for x >= 0 and 1 / (1 - x) for x < 0. With `rate = "head"`, A is
    learned for each head instead. The extra scalars of a head are d, a, l and w [R], without those that its options do
    not use. b and D are learned for each head.

    With `trapezoidal`, `rotation` and `normalise` off and `rate = "head"`, this is Mamba-2 (Dao 2024, arXiv
    2405.21060). The formulas follow the authors' code for one input and one output per head. In that code, all
    heads share B, C and the scalars w. As here, R is K / 4.
    """

    name = "mamba"
    source = "Lahoti 2026, arXiv 2603.15569"
    method = "state space model, running sums with a decay computed from the input"

    def __init__(self, options: MambaOptions, shape: AttentionShape) -> None:
        super().__init__(options, shape)
        heads, width = shape.heads, shape.key_width
        # R is a quarter of K, but at least 1 if K is at least 2.
        self.angles = max(width // 4, min(1, width // 2)) if options.rotation else 0
        widths = {"step": 1, "rate": options.rate == "input", "share": options.trapezoidal, "turns": self.angles}
        self.gates = {name: int(width) for name, width in widths.items() if width}
        # At d = 0 and A = -1, the memory lengths of the heads range from a whole image down to a row.
        self.step_bias = nn.Parameter(inverse_softplus(1 / log_memories(shape, heads).exp()))
        self.skip = nn.Parameter(torch.ones(heads))
        self.log_rate = nn.Parameter(torch.zeros(heads)) if options.rate == "head" else None
        # The first axis has one entry for queries and one for keys.
        self.gain = nn.Parameter(torch.ones(2, heads, width)) if options.normalise else None
        self.bias = nn.Parameter(torch.ones(2, heads, width)) if options.normalise else None

    def _steps(self, gates: Gates, dtype: torch.dtype) -> _Steps:
        size = functional.softplus(gates["step"].squeeze(-1) + self.step_bias.to(dtype).unsqueeze(-1))
        if self.log_rate is None:
            logit = gates["rate"].squeeze(-1)
            rate = (logit.relu() + 1 / (1 + (-logit).relu())).clamp(min=_SLOWEST_RATE)
        else:
            rate = self.log_rate.to(dtype).exp().unsqueeze(-1)
        share = gates["share"].squeeze(-1).sigmoid() if "share" in gates else None
        turns = gates["turns"].tanh() * (0.5 * size.unsqueeze(-1)) if "turns" in gates else None
        return _Steps(size, -size * rate, share, turns)

    def _prepare(self, x: Tensor, which: int, angle: Tensor | None) -> Tensor:
        """Return queries (`which` is 0) or keys (1) [B, H, T, K], normalised and rotated by the angles [B, H, T, R]."""
        if self.gain is not None and self.bias is not None:
            gain, bias = (part[which].to(x.dtype).unsqueeze(1) for part in (self.gain, self.bias))
            x = functional.rms_norm(shrink_huge(x, (-1,)), x.shape[-1:], eps=_EPSILON) * gain + bias
        return x if angle is None else _rotate(x, angle)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, state: MambaState | None, gates: Gates) -> Out[MambaState]:
        dtype = accumulator_dtype(q.dtype)
        s, start, newest = (None, None, None) if state is None else state
        steps, angle = self._steps(gates, dtype), None
        if steps.turns is not None:
            angle = sum_logs(steps.turns, dim=2)
            angle = angle if start is None else angle + start.unsqueeze(2)
            angle = (angle - angle.round()).to(dtype)
        query, key, value = self._prepare(q.to(dtype), 0, angle), self._prepare(k.to(dtype), 1, angle), v.to(dtype)
        size = steps.size.unsqueeze(-1)
        y, keys, values = self.skip.to(dtype)[:, None, None] * value, size * key, value
        if steps.share is not None:
            # s leaves out the newest term. At the next position, one product adds both parts of an input.
            weight = steps.share.unsqueeze(-1) * size
            y = y + weight * (query * key).sum(dim=-1, keepdim=True) * value
            terms = enumerate((key, value, weight))
            keys, values, weights = (_shift(x, None if newest is None else newest[n]) for n, x in terms)
            keys = steps.log_decay.exp().unsqueeze(-1) * (weights + (size - weight)) * keys
            newest = Newest(*(x[:, :, -1].clone() for x in (key, value, weight)))
        sums, s = decayed_causal_sums(query, keys, values, steps.log_decay, s, self.options.chunk)
        return sums + y, MambaState(s, None if angle is None else angle[:, :, -1].clone(), newest)

    def init_state(self, batch: int, capacity: int, device: torch.device, dtype: torch.dtype) -> MambaState:
        heads, K, V = self.shape.heads_and_widths
        s = torch.zeros(batch, heads, K, V, device=device, dtype=accumulator_dtype(dtype))
        angle = s.new_zeros(batch, heads, self.angles) if self.angles else None
        newest = Newest(*(s.new_zeros(batch, heads, width) for width in (K, V, 1)))
        return MambaState(s, angle, newest if self.options.trapezoidal else None)

    def _step(self, q_t: Tensor, k_t: Tensor, v_t: Tensor, state: MambaState, gates_t: Gates) -> Out[MambaState]:
        (s, angle, newest), dtype = state, accumulator_dtype(state.s.dtype)
        steps = self._steps(as_sequence(gates_t), dtype)
        if angle is not None and steps.turns is not None:
            angle.add_(steps.turns.squeeze(2))
            angle = angle.sub_(angle.round()).unsqueeze(2)
        q, k = (self._prepare(x.to(dtype).unsqueeze(2), n, angle).squeeze(2) for n, x in enumerate((q_t, k_t)))
        v, size, decay = v_t.to(dtype), steps.size, steps.log_decay.exp()
        y_t, key, value = self.skip.to(dtype).unsqueeze(-1) * v, size * k, v
        if newest is not None and steps.share is not None:
            weight = steps.share * size
            y_t = y_t + weight * (q * k).sum(dim=-1, keepdim=True) * v
            key, value = decay * (newest.weight + (size - weight)) * newest.key, newest.value.clone()
            for held, new in zip(newest, (k, v, weight), strict=True):
                held.copy_(new)
        return y_t + update_and_read(s, q, key, value, decay), state

    def emit(self, inputs: MixInputs) -> None:
        (_, K, V), builder = inputs.sizes, inputs.builder
        newest = (K, V, 1) if self.options.trapezoidal else (0, 0, 0)
        widths = dict(zip(("state", "angles", "key", "value", "weight"), (K * V, self.angles, *newest), strict=True))
        rate = torch.zeros_like(self.skip) if self.log_rate is None else self.log_rate.exp()
        affine = None if self.gain is None or self.bias is None else torch.stack([self.gain, self.bias], dim=1)
        inputs.emit(
            "mamba",
            **{name: inputs.state(width) if width else NO_BUFFER for name, width in widths.items()},
            constants=builder.shared(torch.stack([self.step_bias, self.skip, rate], dim=1)),
            affine=NO_BUFFER if affine is None else builder.shared(affine.movedim(2, 0)),
            R=self.angles,
            trapezoidal=self.options.trapezoidal,
            input_rate=self.log_rate is None,
        )


def _shift(x: Tensor, before: Tensor | None) -> Tensor:
    """Move x [B, H, T, W] one position later: `before` [B, H, W] (None: 0) comes first, the last is dropped."""
    first = torch.zeros_like(x[:, :, 0]) if before is None else before
    return torch.cat([first.unsqueeze(2), x[:, :, :-1]], dim=2)


def _rotate(x: Tensor, angle: Tensor) -> Tensor:
    """Return x [..., K] with coordinates 2 i and 2 i + 1 rotated by angle i. `angle` [..., R] is in turns."""
    radians = angle * (2 * math.pi)
    sine, cosine = radians.sin(), radians.cos()
    pairs, rest = x.split([2 * angle.shape[-1], x.shape[-1] - 2 * angle.shape[-1]], dim=-1)
    even, odd = pairs.unflatten(-1, (-1, 2)).unbind(-1)
    rotated = torch.stack([even * cosine - odd * sine, even * sine + odd * cosine], dim=-1)
    return torch.cat([rotated.flatten(-2), rest], dim=-1)
