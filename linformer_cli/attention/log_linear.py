"""Log-linear attention (Guo 2025, arXiv 2506.04761): one state for each power of two, read with weights by level."""

from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from linformer_cli.native.program import NO_BUFFER, MixInputs
from .base import Attention, AttentionOptions, AttentionShape, Gates, Memory, Out, setting
from .parts.chunks import PowerOfTwoChunk
from .parts.feature_maps import Elu
from .parts.level_sums import LevelInputs, count_buckets, read_levels, step_levels
from .parts.memory_lengths import inverse_softplus, log_memories, of_heads
from .parts.scaling import directions, scale_outputs
from .parts.sums import divide_by_weight
from .tensors import accumulator_dtype, host_number

_OVER = {"linear": 0, "mamba2": 1, "deltanet": 2}  # the code of each base mechanism in native/ops/log_linear.h
# In `linear`, sums are divided by their total weight, which would underflow in float32 with smaller logits of lambda.
_LEAST_LOGIT = -64.0


class LogLinearOptions(AttentionOptions):
    over: Literal["linear", "mamba2", "deltanet"] = setting("mamba2", "the mechanism whose state has levels")
    chunk: PowerOfTwoChunk = 64


class LogLinearState(NamedTuple):
    """s [B, H, G, K, V], the buckets of a Fenwick tree, and the number of positions (int64).

    Bucket b holds 2^b positions if bit b of their number is 1, else 0. In `linear`, column V is the sum of phi(k_j).
    """

    s: Tensor
    position: Tensor


class _FixedState(LogLinearState):
    """A state with room for a whole image, whose position is a number on the device, which the engine counts."""


class LogLinearAttention(Attention[LogLinearOptions, LogLinearState]):
    """y_t is computed from the sum over levels l of lambda_t^l q_t S_t^l.

    S_t^0 is the term of position t itself, and S_t^(b + 1) is the state that a base mechanism has after the 2^b
    positions of bucket b of a Fenwick tree, decayed up to t. The 1 + ceil(log2 T) weights lambda_t^l are the softplus
    of the head's last extra scalars. The base mechanism is

        linear:    S <- S + phi(k) v^T, with phi = elu + 1
        mamba2:    S <- exp(-A dt) S + dt k v^T, with dt = softplus(x + dt_bias)
        deltanet:  S <- alpha (I - beta k k^T) S + beta k v^T, as in `DeltanetAttention`

    In `linear`, the sum is divided by its total weight, the sum of lambda_t^l phi(q_t) . z_t^l, and scalars of lambda
    below -64 count as -64. In `mamba2` and `deltanet`, the sum is divided by its root mean square.

    This is section 3 of the source, with two differences. A lambda is a projection of the input; the source multiplies
    this projection by a learned number for each level and head. `linear` has a feature map and a denominator.
    """

    name = "log_linear"
    source = "Guo 2025, arXiv 2506.04761"
    family = "kernel"
    method = "sums over powers of two, weighted by level"
    memory = Memory.GROWING

    def __init__(self, options: LogLinearOptions, shape: AttentionShape) -> None:
        super().__init__(options, shape)
        self.levels = (shape.positions - 1).bit_length() + 1
        scalars = {"linear": {}, "mamba2": {"step": 1}, "deltanet": {"erase": 1, "decay": 1}}[options.over]
        self.gates = {**scalars, "levels": self.levels}
        self.feature_map = Elu(shape.heads, shape.key_width)
        # Initially, the memory lengths of the heads range from a whole image down to a row.
        memories = log_memories(shape, shape.heads).exp()
        if options.over == "mamba2":
            self.dt_bias = nn.Parameter(inverse_softplus(1 / memories))
            self.a_log = nn.Parameter(torch.zeros(shape.heads))
        elif options.over == "deltanet":
            self.gate_bias = nn.Parameter(memories.log())

    def _inputs(self, q: Tensor, k: Tensor, v: Tensor, gates: Gates, dtype: torch.dtype) -> LevelInputs:
        """Return the inputs [B, H, .., W] of the sums, for one position or several."""
        q, k, v = (x.to(dtype) for x in (q, k, v))
        divided = self.options.over == "linear"
        scales = functional.softplus(gates["levels"].clamp(min=_LEAST_LOGIT) if divided else gates["levels"])
        if divided:
            # With a column of ones appended to the values, the last column of the sums is the total weight.
            return LevelInputs(self.feature_map(q), self.feature_map(k), functional.pad(v, (0, 1), value=1.0), scales)
        if self.options.over == "mamba2":
            dt = functional.softplus(gates["step"].squeeze(-1) + of_heads(self.dt_bias, dtype, q.dim() - 1))
            return LevelInputs(q, k, dt.unsqueeze(-1) * v, scales, -of_heads(self.a_log, dtype, dt.dim()).exp() * dt)
        beta = gates["erase"].squeeze(-1).sigmoid()
        log_alpha = functional.logsigmoid(gates["decay"].squeeze(-1) + of_heads(self.gate_bias, dtype, beta.dim()))
        q, k = directions(functional.silu(q)), directions(functional.silu(k))
        return LevelInputs(q, k, beta.unsqueeze(-1) * v, scales, log_alpha, beta)

    def _finish(self, sums: Tensor) -> Tensor:
        if self.options.over == "linear":
            return divide_by_weight(sums[..., :-1], sums[..., -1])
        return scale_outputs(sums, None)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, state: LogLinearState | None, gates: Gates
    ) -> Out[LogLinearState]:
        length = v.shape[2]
        if state is None:
            state = self.init_state(len(v), 0, v.device, v.dtype)
        known = int(state.position)
        s = functional.pad(state.s, (0, 0, 0, 0, 0, max(count_buckets(known + length) - state.s.shape[2], 0)))
        sums, s = read_levels(self._inputs(q, k, v, gates, s.dtype), s, known, self.options.chunk)
        return self._finish(sums), LogLinearState(s, state.position + length)

    def init_state(self, batch: int, capacity: int, device: torch.device, dtype: torch.dtype) -> LogLinearState:
        columns = self.shape.value_width + (self.options.over == "linear")
        sizes = batch, self.shape.heads, count_buckets(capacity), self.shape.key_width, columns
        s = torch.zeros(sizes, device=device, dtype=accumulator_dtype(dtype))
        return LogLinearState(s, host_number())

    def _step(
        self, q_t: Tensor, k_t: Tensor, v_t: Tensor, state: LogLinearState, gates_t: Gates
    ) -> Out[LogLinearState]:
        s, position = state
        inputs, fixed = self._inputs(q_t, k_t, v_t, gates_t, s.dtype), isinstance(state, _FixedState)
        sums, s = step_levels(inputs, s, position if fixed else int(position))
        return self._finish(sums), state if fixed else LogLinearState(s, position + 1)

    def fix_state(self, state: LogLinearState, place: Tensor, room: Tensor, dtype: torch.dtype) -> LogLinearState:
        return _FixedState(state.s, place)

    def emit(self, inputs: MixInputs) -> None:
        shape, builder, over = self.shape, inputs.builder, self.options.over
        buckets = count_buckets(shape.positions)
        # The second state is z of each bucket in `linear`, and in `mamba2` the decay of each bucket since its creation.
        second = {"linear": shape.key_width, "mamba2": 1, "deltanet": 0}[over]
        buffers = {
            "state": inputs.state(buckets * shape.key_width * shape.value_width),
            "second": inputs.state(buckets * second, initial=1.0) if second else NO_BUFFER,
        }
        if over == "mamba2":
            buffers |= {"bias": builder.shared(self.dt_bias), "rate": builder.shared(self.a_log.exp())}
        elif over == "deltanet":
            buffers["bias"] = builder.shared(self.gate_bias)
        inputs.emit("log_linear", **buffers, over=_OVER[over], G=buckets, levels=self.levels)

    def list_states(self, state: LogLinearState) -> list[Tensor]:
        """Return the buckets, with room for a whole image, and the second state of `emit`."""
        s = functional.pad(state.s, (0, 0, 0, 0, 0, count_buckets(self.shape.positions) - state.s.shape[2]))
        if self.options.over == "linear":
            return [s[..., :-1], s[..., -1]]
        return [s, s.new_ones(s.shape[:3])] if self.options.over == "mamba2" else [s]
