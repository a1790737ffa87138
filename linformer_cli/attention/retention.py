"""Retention (Sun 2023, RetNet, arXiv 2307.08621): running sums with a fixed decay per head."""

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from .base import AttentionShape, Chunk, Gates, MixInputs, Out, SumAttention, setting
from .kernels.registry import CAUSAL_SUMS, STEP_SUMS, SumsStep, kernel_for
from .parts.memory_lengths import FadingOptions
from .parts.scaling import SUM_FLOOR, scale_outputs
from .parts.sums import decayed_causal_sums, multiply_features, sum_both_ways, update_and_read
from .tensors import accumulator_dtype, constant, host_number

_DEFAULT_WAVES = 2


class RetentionOptions(FadingOptions):
    distance: Literal["raster", "plane"] = setting(
        "raster", "decay with the distance in positions ('raster'), or in rows and columns ('plane')"
    )
    waves: int | None = setting(None, "P, sharpness of the decay over columns (default: 2); 'plane' only", gt=0, le=16)
    chunk: Chunk = 64

    def check(self) -> None:
        super().check()
        if self.waves is not None and self.distance != "plane":
            raise ValueError("'waves' is for distance 'plane'")


class RetentionState(NamedTuple):
    """s [B, H, C, V], the decayed sum of phi(k_j) v_j^T with C = (2 P + 1) K, and the number of positions (int64)."""

    s: Tensor
    position: Tensor


class RetentionAttention(SumAttention[RetentionOptions, RetentionState]):
    """y_t = SiLU(g_t) * u_t / rms(u_t), with u_t = sum over j <= t of w(t, j) (q_t . k_j) v_j / sqrt(K).

    Let m_h be the memory of head h in positions. The memories are spaced geometrically, from the length of an image
    down to the length of a row. Let r and c be the row and column of a position, and W the length of a row. Then

        raster:  w(t, j) = exp(-(t - j) / m_h)
        plane:   w(t, j) = exp(-(r_t - r_j) W / m_h) cos(pi (c_t - c_j) / (2 W))^(2 P)

    Both are running sums, s_t = d_t s_{t-1} + phi(k_t) v_t^T and u_t = phi(q_t) s_t / sqrt(K). In `raster`, phi(x) = x
    and d_t = exp(-1 / m_h). In `plane`, phi(x_t) holds x_t times 1, cos(pi n c_t / W) and sin(pi n c_t / W) for n =
    1 .. P, each with its coefficient, and d_t is exp(-W / m_h) at the first position of a row, else 1.

    g_t holds V extra scalars of the head. The formula for u_t and y_t follows equations 5 to 8 of the source. The
    source uses different decay rates, rotates queries and keys, and normalises within groups. `plane` is our addition.

    In the bidirectional form, j runs over all positions, and w(t, j) has the absolute distances, as in bidirectional
    RetNets. It is the sum of both directions, in which position t counts once.
    """

    name = "retention"
    source = "Sun 2023, arXiv 2307.08621"
    method = "running sums, a fixed decay per head"
    bidirectional = True

    def __init__(self, options: RetentionOptions, shape: AttentionShape) -> None:
        super().__init__(options, shape)
        self.score_scale = float(shape.key_width**-0.5)
        self.plane = options.distance == "plane"
        self.period = shape.row if self.plane else 1
        self.waves = options.waves or _DEFAULT_WAVES if self.plane else 0
        self.gates = {"output": shape.value_width} if options.output_gate else {}
        # log d of each head [H]: per position, or per row in 'plane'.
        span = shape.row if self.plane else 1
        self.log_decay = tuple(-span / memory for memory in options.memory_lengths(shape, shape.heads))
        # cos(x / 2)^(2 P) = sum over n of a_n cos(n x). The query factor and the key factor each contain sqrt(a_n).
        binomials = [math.comb(2 * self.waves, self.waves + n) / 4**self.waves for n in range(self.waves + 1)]
        self.wave_scales = tuple(math.sqrt(a) for a in (binomials[0], *(2 * a for a in binomials[1:])))

    @property
    def unbounded(self) -> bool:
        return not self.plane

    def _wave_factors(self, column: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the factors f [*, 2 P + 1] of `column` [*], where f_t . f_j is the power of the cosine."""
        n = torch.arange(1, self.waves + 1, device=column.device)
        angles = (column.unsqueeze(-1) * n).to(dtype) * (math.pi / self.shape.row)
        scales = constant(self.wave_scales, column.device, dtype)
        first = scales[:1].expand(*column.shape, 1)
        return torch.cat([first, scales[1:] * angles.cos(), scales[1:] * angles.sin()], dim=-1)

    def _log_decays(self, column: Tensor, dtype: torch.dtype) -> Tensor:
        """Return log d_t [H, *] of every head for `column` [*]."""
        fades = (column == 0) if self.plane else torch.ones_like(column)
        return constant(self.log_decay, column.device, dtype).view(-1, *[1] * column.dim()) * fades

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, state: RetentionState | None, gates: Gates
    ) -> Out[RetentionState]:
        s, position = (None, host_number()) if state is None else state
        sums, s = self._sum(q, k, v, s, position)
        return scale_outputs(sums, gates.get("output")), RetentionState(s, position + v.shape[2])

    def _sum(self, q: Tensor, k: Tensor, v: Tensor, s: Tensor | None, position: Tensor | int) -> tuple[Tensor, Tensor]:
        """Return u [B, H, T, V] from `position` on, and the last s."""
        dtype = accumulator_dtype(q.dtype)
        column = (position + torch.arange(v.shape[2], device=v.device)) % self.shape.row
        log_decay = self._log_decays(column, dtype).unsqueeze(0)
        if not self.plane and (sum_causally := kernel_for(CAUSAL_SUMS, q, k, v)):
            return sum_causally(q, k, v, log_decay.unsqueeze(-1), s, self.score_scale)
        factors = self._wave_factors(column, dtype) if self.plane else None
        inputs = q.to(dtype) * self.score_scale, k.to(dtype), v.to(dtype)
        return decayed_causal_sums(*inputs, log_decay, s, self.options.chunk, factors)

    def _attend_all(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None, gates: Gates) -> Tensor:
        dtype, length = accumulator_dtype(q.dtype), v.shape[2]
        # The rows of the reversed image must start at its first position, so the last row is filled up.
        fill = (0, 0, 0, -length % self.shape.row if self.plane else 0)
        q, k, wide = (functional.pad(x.to(dtype), fill) for x in (q, k, v))
        both = sum_both_ways(lambda q, k, v: self._sum(q, k, v, None, 0)[0], q, k, wide)
        own = (q * k).sum(dim=-1, keepdim=True) * self.score_scale * wide
        return scale_outputs((both - own)[:, :, :length], gates.get("output"))

    def init_state(self, batch: int, capacity: int, device: torch.device, dtype: torch.dtype) -> RetentionState:
        widths = (2 * self.waves + 1) * self.shape.key_width, self.shape.value_width
        s = torch.zeros(batch, self.shape.heads, *widths, device=device, dtype=accumulator_dtype(dtype))
        return RetentionState(s, host_number())

    def _step(
        self, q_t: Tensor, k_t: Tensor, v_t: Tensor, state: RetentionState, gates_t: Gates
    ) -> Out[RetentionState]:
        s, position = state
        gate, dtype = gates_t.get("output"), accumulator_dtype(s.dtype)
        if not self.plane and (step := kernel_for(STEP_SUMS, s, v_t)):
            decay = constant(self.log_decay, s.device, dtype).unsqueeze(-1)
            form = SumsStep(decay, gate=gate, scale=self.score_scale, epsilon=SUM_FLOOR, decay_form="log")
            return step(s, q_t, k_t, v_t, form), RetentionState(s, position + 1)
        column = torch.full((), int(position) % self.shape.row, device=s.device)
        query, key = q_t.to(dtype) * self.score_scale, k_t.to(dtype)
        if self.plane:
            factors = self._wave_factors(column, dtype)
            query, key = multiply_features(query, factors), multiply_features(key, factors)
        decay = self._log_decays(column, dtype).exp().unsqueeze(-1)
        sums = update_and_read(s, query, key, v_t.to(dtype), decay)
        return scale_outputs(sums, gate), RetentionState(s, position + 1)

    def emit(self, inputs: MixInputs) -> None:
        shape, builder, factors = self.shape, inputs.builder, 2 * self.waves + 1
        # In 'raster', every position is a row of its own, with the factor 1.
        row = shape.row if self.plane else 1
        table = self._wave_factors(torch.arange(row), torch.float32) if self.plane else torch.ones(1, 1)
        inputs.emit(
            "retention",
            state=inputs.state(factors * shape.key_width * shape.value_width),
            decay=builder.shared(torch.tensor(self.log_decay).exp()),
            factors=builder.shared(table),
            F=factors,
            columns=row,
            gated=self.options.output_gate,
            scale=self.score_scale,
        )
