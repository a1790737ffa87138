"""mLSTM (Beck 2024, xLSTM, arXiv 2405.04517): running sums with an exponential input gate and a forget gate."""

from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from .base import AttentionOptions, AttentionShape, Chunk, Gates, MixInputs, Out, SumAttention, setting
from .parts.memory_lengths import log_memories, of_heads
from .parts.scaling import OUTPUT_FLOOR
from .parts.sums import decayed_causal_sums, sum_logs, update_and_read
from .tensors import accumulator_dtype

# The denominator is at least exp(-60), far below the rounding error of a sum whose largest weight is 1. Without this
# bound, exp(-m) can round to 0, and a query of zeros gives 0 / 0.
_LARGEST_EXPONENT = 60.0


class MlstmOptions(AttentionOptions):
    forget_gate: Literal["sigmoid", "exponential"] = setting(
        "sigmoid", "the activation of the forget gate; with 'exponential', old positions can gain weight"
    )
    normalise: bool = setting(True, "divide the output of each head by its root mean square")
    chunk: Chunk = 64


class MlstmState(NamedTuple):
    """s [B, H, K, V + 1], which holds exp(-m) C and, in its last column, exp(-m) n; and m [B, H]."""

    s: Tensor
    m: Tensor


class MlstmAttention(SumAttention[MlstmOptions, MlstmState]):
    """y_t = h_t / rms(h_t), with h_t = C_t^T q_t / max(|n_t . q_t|, 1) and two running sums:

        C_t = f_t C_{t-1} + i_t k_t v_t^T
        n_t = f_t n_{t-1} + i_t k_t

    Keys are divided by sqrt(K). The input gate is i_t = exp(x_t), and the forget gate is f_t = sigmoid(z_t + b). x_t
    and z_t are the head's two extra scalars, and b is learned for each head. With `forget_gate = "exponential"`, f_t is
    exp(z_t + b). Without `normalise`, y_t is h_t.

    i_t can overflow, so the state holds exp(-m_t) C_t and exp(-m_t) n_t, where m_t = max(log f_t + m_{t-1}, x_t, 0).
    h_t is then the quotient exp(-m_t) C_t^T q_t / max(|exp(-m_t) n_t . q_t|, exp(-m_t)). It does not depend on m_t.

    The formulas of h_t are equations 19 to 27 of the source, except for the 0 in m_t, which keeps exp(-m_t) from
    overflowing. Unlike the authors' code, we add no epsilon to the denominator, because h_t would then depend on m_t.
    The source normalises h_t in the layer around the cell, and multiplies it by an output gate, which the network
    setting `output_gate` adds.
    """

    name = "mlstm"
    source = "Beck 2024, arXiv 2405.04517"
    method = "running sums, exponential input gate"
    gates = {"input": 1, "forget": 1}

    def __init__(self, options: MlstmOptions, shape: AttentionShape) -> None:
        super().__init__(options, shape)
        self.score_scale = float(shape.key_width**-0.5)
        # At z = 0, the memory lengths of the heads range from a whole image down to a row.
        bias = log_memories(shape, shape.heads)
        self.gate_bias = nn.Parameter(bias if options.forget_gate == "sigmoid" else functional.logsigmoid(bias))

    def _log_gates(self, gates: Gates, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return log i and log f, each [B, H, T], or [B, H] for one position."""
        log_input, forget = (gates[name].squeeze(-1) for name in ("input", "forget"))
        forget = forget + of_heads(self.gate_bias, dtype, forget.dim())
        return log_input, functional.logsigmoid(forget) if self.options.forget_gate == "sigmoid" else forget

    def _normalise(self, h: Tensor) -> Tensor:
        return functional.rms_norm(h, h.shape[-1:], eps=OUTPUT_FLOOR) if self.options.normalise else h

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, state: MlstmState | None, gates: Gates) -> Out[MlstmState]:
        dtype = accumulator_dtype(q.dtype)
        s, before = (None, q.new_zeros(q.shape[:2], dtype=dtype)) if state is None else state
        log_input, log_forget = self._log_gates(gates, dtype)
        m, log_kept = _stabilise(log_input.detach(), log_forget.detach(), before)
        # The added difference is 0 and carries the gradient.
        log_kept = log_kept + (log_forget - log_forget.detach())
        weight = (log_input - m).exp() * self.score_scale
        values = functional.pad(v.to(dtype), (0, 1), value=1.0)
        inputs = q.to(dtype), k.to(dtype) * weight.unsqueeze(-1), values
        sums, s = decayed_causal_sums(*inputs, log_kept, s, self.options.chunk)
        return self._normalise(_divide(sums, m)), MlstmState(s, m[..., -1].clone())

    def init_state(self, batch: int, capacity: int, device: torch.device, dtype: torch.dtype) -> MlstmState:
        sizes = batch, self.shape.heads, self.shape.key_width, self.shape.value_width + 1
        s = torch.zeros(sizes, device=device, dtype=accumulator_dtype(dtype))
        return MlstmState(s, s.new_zeros(sizes[:2]))

    def _step(self, q_t: Tensor, k_t: Tensor, v_t: Tensor, state: MlstmState, gates_t: Gates) -> Out[MlstmState]:
        s, m = state
        log_input, log_forget = self._log_gates(gates_t, m.dtype)
        faded = log_forget + m
        m.copy_(torch.maximum(faded, log_input.clamp(min=0)))
        key = k_t.to(m.dtype) * ((log_input - m).exp() * self.score_scale).unsqueeze(-1)
        values = functional.pad(v_t.to(m.dtype), (0, 1), value=1.0)
        sums = update_and_read(s, q_t.to(m.dtype), key, values, (faded - m).exp().unsqueeze(-1))
        return self._normalise(_divide(sums, m)), state

    def emit(self, inputs: MixInputs) -> None:
        _, K, V = inputs.sizes
        inputs.emit(
            "mlstm",
            C=inputs.state(K * V),
            n=inputs.state(K),
            m=inputs.state(1),
            forget_bias=inputs.builder.shared(self.gate_bias),
            sigmoid_forget=self.options.forget_gate == "sigmoid",
            normalised=self.options.normalise,
            scale=self.score_scale,
            largest_exponent=_LARGEST_EXPONENT,
        )

    def list_states(self, state: MlstmState) -> list[Tensor]:
        s, m = state
        return [s[..., :-1], s[..., -1], m]


def _stabilise(log_input: Tensor, log_forget: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
    """Return m_t and log f_t + m_{t-1} - m_t, each [B, H, T], for log i and log f [B, H, T] and m [B, H] before.

    For F_t, the sum of log f up to t, m_t - F_t is the largest of `before` and of max(log i_j, 0) - F_j over j <= t.
    The second result is its value before t minus that at t, so it is never positive.
    """
    total = sum_logs(log_forget, dim=-1)
    peaks = log_input.clamp(min=0) - total
    highest = torch.cat([before.detach().unsqueeze(-1).to(peaks.dtype), peaks], dim=-1).cummax(dim=-1).values
    m, log_kept = total + highest[..., 1:], highest[..., :-1] - highest[..., 1:]
    return m.to(log_input.dtype), log_kept.to(log_input.dtype)


def _divide(sums: Tensor, m: Tensor) -> Tensor:
    """Return the outputs [..., V] from sums [..., V + 1], whose last column is exp(-m) n . q, and m [...]."""
    least = (-m.clamp(max=_LARGEST_EXPONENT)).exp()
    return sums[..., :-1] / torch.maximum(sums[..., -1].abs(), least).unsqueeze(-1)
