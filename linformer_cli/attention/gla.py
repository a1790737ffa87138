"""Gated linear attention (Yang 2023, arXiv 2312.06635): running sums with a decay computed from the input."""

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from .base import AttentionShape, Gates, MixInputs, Out, SumAttention, setting
from .kernels.registry import CAUSAL_SUMS, STEP_SUMS, SumsStep, kernel_for
from .parts.chunks import PowerOfTwoChunk
from .parts.memory_lengths import FadingOptions
from .parts.scaling import SUM_FLOOR, scale_outputs
from .parts.sums import decayed_causal_sums, featurewise_decayed_causal_sums, sum_both_ways, update_and_read
from .tensors import accumulator_dtype, constant


class GlaOptions(FadingOptions):
    gate: Literal["vector", "scalar"] = setting("vector", "'vector': a gate per key dimension; 'scalar': one per head")
    temperature: float = setting(16.0, "tau; a larger value makes the fastest possible decay slower", ge=1, le=1000)
    chunk: PowerOfTwoChunk = 64


class GlaState(NamedTuple):
    """s [B, H, K, V], the decayed sum of k_j v_j^T."""

    s: Tensor


class GlaAttention(SumAttention[GlaOptions, GlaState]):
    """y_t = SiLU(g_t) * u_t / rms(u_t), with s_t = diag(a_t) s_{t-1} + k_t v_t^T and u_t = q_t s_t / sqrt(K).

    The gates are a_t = sigmoid(x_t + b)^(1 / tau), where x_t holds the first K extra scalars of the head (one for
    `scalar`). g_t holds the next V extra scalars. b is not learned. It is chosen so that a key dimension (for `scalar`,
    a head) remembers m positions at x = 0: a = exp(-1 / m). The values of m are spaced geometrically, from the length
    of an image down to the length of a row.

    This is section 4 of the source, with these differences. The source computes the gates through a bottleneck of width
    16, initialises all gates alike, and has a layer norm with a gain. Our parallel form never divides by a gate.

    The source has no bidirectional form. Here, it is the sum of both directions, in which position t counts once: u_t
    is the sum over all j of (q_t * w_tj) . k_j v_j / sqrt(K), where w_tj is the product of the gates of j + 1 to t for
    j < t, of t to j - 1 for j > t, and 1 for j = t.
    """

    name = "gla"
    source = "Yang 2023, arXiv 2312.06635"
    method = "running sums, a decay computed from the input"
    bidirectional = True

    def __init__(self, options: GlaOptions, shape: AttentionShape) -> None:
        super().__init__(options, shape)
        self.score_scale = float(shape.key_width**-0.5)
        vector = options.gate == "vector"
        self.gates = {"decay": shape.key_width if vector else 1}
        if options.output_gate:
            self.gates["output"] = shape.value_width
        # log sigmoid(b) = -tau / m, and b is the logit of that sigmoid.
        memories = options.memory_lengths(shape, shape.key_width if vector else shape.heads)
        log_sigmoids = [-options.temperature / memory for memory in memories]
        self.gate_start = tuple(x - math.log(-math.expm1(x)) for x in log_sigmoids)

    def _log_decay(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Return log a [B, H, .., K or 1] in `dtype` from the extra scalars x."""
        start = constant(self.gate_start, x.device, dtype)
        if self.options.gate == "scalar":
            start = start.view(-1, *[1] * (x.dim() - 2))
        return functional.logsigmoid(x.to(dtype) + start) / self.options.temperature

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, state: GlaState | None, gates: Gates) -> Out[GlaState]:
        log_decay = self._log_decay(gates["decay"], accumulator_dtype(q.dtype))
        sums, s = self._sum(q, k, v, log_decay, None if state is None else state.s)
        return scale_outputs(sums, gates.get("output")), GlaState(s)

    def _sum(self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, carried: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return u [B, H, T, V] and the last s."""
        if sum_causally := kernel_for(CAUSAL_SUMS, q, k, v):
            return sum_causally(q, k, v, log_decay, carried, self.score_scale)
        dtype = log_decay.dtype
        inputs = q.to(dtype) * self.score_scale, k.to(dtype), v.to(dtype)
        if self.options.gate == "vector":
            return featurewise_decayed_causal_sums(*inputs, log_decay, carried, self.options.chunk)
        return decayed_causal_sums(*inputs, log_decay.squeeze(-1), carried, self.options.chunk)

    def _attend_all(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None, gates: Gates) -> Tensor:
        dtype = accumulator_dtype(q.dtype)
        log_decay = self._log_decay(gates["decay"], dtype)
        q, k, wide = q.to(dtype), k.to(dtype), v.to(dtype)
        both = sum_both_ways(lambda q, k, v, log_decay: self._sum(q, k, v, log_decay, None)[0], q, k, wide, log_decay)
        own = (q * k).sum(dim=-1, keepdim=True) * self.score_scale * wide
        return scale_outputs(both - own, gates.get("output"))

    def init_state(self, batch: int, capacity: int, device: torch.device, dtype: torch.dtype) -> GlaState:
        widths = self.shape.heads, self.shape.key_width, self.shape.value_width
        return GlaState(torch.zeros(batch, *widths, device=device, dtype=accumulator_dtype(dtype)))

    def _step(self, q_t: Tensor, k_t: Tensor, v_t: Tensor, state: GlaState, gates_t: Gates) -> Out[GlaState]:
        s = state.s
        if step := kernel_for(STEP_SUMS, s, v_t):
            start = constant(self.gate_start, s.device, accumulator_dtype(s.dtype))
            bias = start.unsqueeze(-1) if self.options.gate == "scalar" else start
            form = SumsStep(gates_t["decay"], bias, gate=gates_t.get("output"), decay_form="gate", epsilon=SUM_FLOOR)
            form = form._replace(scale=self.score_scale, power=1 / self.options.temperature)
            return step(s, q_t, k_t, v_t, form), state
        decay = self._log_decay(gates_t["decay"], s.dtype).exp_()
        query, key, value = q_t.to(s.dtype) * self.score_scale, k_t.to(s.dtype), v_t.to(s.dtype)
        return scale_outputs(update_and_read(s, query, key, value, decay), gates_t.get("output")), state

    def emit(self, inputs: MixInputs) -> None:
        shape, options = self.shape, self.options
        start = torch.tensor(self.gate_start).expand(shape.heads, -1) if options.gate == "vector" else self.gate_start
        inputs.emit(
            "gla",
            state=inputs.state(shape.key_width * shape.value_width),
            start=inputs.builder.shared(torch.as_tensor(start)),
            gates=self.gates["decay"],
            gated=options.output_gate,
            scale=self.score_scale,
            power=1 / options.temperature,
        )
