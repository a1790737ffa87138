"""Bases of mechanisms whose state follows the delta rule."""

from abc import abstractmethod
from typing import Annotated, Any, ClassVar, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from linformer_cli.attention.base import Attention, AttentionOptions, AttentionShape, Chunk, Memory
from linformer_cli.attention.kernels.registry import DELTA_RULE
from linformer_cli.attention.tensors import accumulator_dtype
from linformer_cli.native.program import MixInputs

from .delta_rule import DeltaState, Updates, delta_step, delta_sums
from .initial import log_memories
from .scaling import OUTPUT_FLOOR, directions


class DeltaInputs(NamedTuple):
    """What T positions of N updates each do: queries [B, H, N T, K], updates, and the bonus [B, H, T, V] or None.

    The last update of a position reads its output. The bonus is added to the scaled output.
    """

    q: Tensor
    updates: Updates
    bonus: Tensor | None = None


class DeltaAttention(Attention):
    """y_t = q_t s_t / rms(q_t s_t), plus a bonus, where s_t follows the delta rule."""

    family = "kernel"
    memory = Memory.CONSTANT
    updates_per_position: ClassVar[int] = 1
    compiled = DELTA_RULE

    def __init__(self, options: AttentionOptions, shape: AttentionShape, chunk: int) -> None:
        """`chunk` is the number of updates per chunk of the parallel form."""
        super().__init__(options, shape)
        self.chunk = chunk

    @abstractmethod
    def prepare(self, q: Tensor, k: Tensor, v: Tensor, extra: Tensor) -> DeltaInputs:
        """The inputs of the delta rule for q, k and v, which have the type of the state, and `extra` [B, H, T, E]."""

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, state: Any, extra: Tensor) -> tuple[Tensor, DeltaState]:
        dtype = accumulator_dtype(q.dtype)
        x = self.prepare(q.to(dtype), k.to(dtype), v.to(dtype), extra)
        sums, s = delta_sums(x.q, x.updates, None if state is None else state.s, self.chunk)
        count = self.updates_per_position
        return finish(sums[:, :, count - 1 :: count], x.bonus), DeltaState(s)

    def init_state(self, batch: int, capacity: int, device: torch.device, dtype: torch.dtype) -> DeltaState:
        sizes = batch, self.shape.heads, self.shape.key_width, self.shape.value_width
        return DeltaState(torch.zeros(sizes, device=device, dtype=accumulator_dtype(dtype)))

    def _step(
        self, q_t: Tensor, k_t: Tensor, v_t: Tensor, state: DeltaState, extra_t: Tensor
    ) -> tuple[Tensor, DeltaState]:
        s = state.s
        q, k, v = (x.to(s.dtype).unsqueeze(2) for x in (q_t, k_t, v_t))
        x = self.prepare(q, k, v, extra_t.unsqueeze(2))
        for n in range(self.updates_per_position):
            updates = Updates._make(None if part is None else part[:, :, n : n + 1] for part in x.updates)
            sums = delta_step(x.q[:, :, n : n + 1], updates, s)
        return finish(sums, x.bonus).squeeze(2), state


def finish(sums: Tensor, bonus: Tensor | None) -> Tensor:
    """Sums [B, H, T, V] divided by their root mean square, plus the bonus."""
    y = functional.rms_norm(sums, sums.shape[-1:], eps=OUTPUT_FLOOR)
    return y if bonus is None else y + bonus


class GatedDeltaOptions(AttentionOptions):
    """Options of all gated delta rules."""

    negative_eigenvalues: Annotated[
        bool, Field(description="let erase gates reach 2, not 1, so that an update can reverse the sign of a value")
    ] = False
    chunk: Chunk = 32


class Gates(NamedTuple):
    """The numbers of extra scalars of a head: erase gates, write gates and decay gates, in this order.

    `erase` is 1 or K. `write` is 1 or V, or 0 if the only erase gate is also the write gate. `decay` is 1 or K, or 0 if
    the state does not decay.
    """

    erase: int
    write: int
    decay: int


class GatedDeltaAttention(DeltaAttention):
    """y_t = q_t s_t / rms(q_t s_t), where s_t = (I - k_t (b_t * k_t)^T) diag(a_t) s_{t-1} + k_t (w_t * v_t)^T.

    Queries and keys are silu(q) and silu(k), scaled to length 1. The erase gate b_t and the write gate w_t are sigmoids
    of extra scalars. The decay is a_t = sigmoid(x_t + bias), where x_t are extra scalars and the bias is learned.
    """

    options: GatedDeltaOptions

    def __init__(self, options: GatedDeltaOptions, shape: AttentionShape, gates: Gates) -> None:
        super().__init__(options, shape, options.chunk)
        self.gates = gates
        self.extra_per_head = sum(gates)
        self.largest_erase = 2.0 if options.negative_eigenvalues else 1.0
        self.gate_bias: nn.Parameter | None = None
        if gates.decay:
            # Initially, the memory lengths of the heads, or of the rows of s, range from an image down to an image row.
            count = shape.heads if gates.decay == 1 else gates.decay
            logs = log_memories(shape, count)
            self.gate_bias = nn.Parameter(logs if gates.decay == 1 else logs.repeat(shape.heads, 1))

    def prepare(self, q: Tensor, k: Tensor, v: Tensor, extra: Tensor) -> DeltaInputs:
        erase, write, decay = extra.to(v.dtype).split(self.gates, dim=-1)
        q, k = directions(functional.silu(q)), directions(functional.silu(k))
        erase = self.largest_erase * erase.sigmoid()
        log_a = v.new_zeros(1, 1, v.shape[2], 1)
        if self.gate_bias is not None:
            log_a = functional.logsigmoid(decay + self.gate_bias.to(v.dtype).view(-1, 1, self.gates.decay))
        if not self.gates.write:
            return DeltaInputs(q, Updates(k, v, erase, log_a))
        return DeltaInputs(q, Updates(k, write.sigmoid() * v, v.new_ones(1, 1, v.shape[2], 1), log_a, erase * k))

    def emit(self, inputs: MixInputs) -> None:
        gates = self.gates
        buffers = (
            inputs.state(self.shape.key_width * self.shape.value_width),
            -1 if self.gate_bias is None else inputs.builder.shared(self.gate_bias),
        )
        integers = (int(gates.erase > 1), gates.write, int(gates.decay > 1))
        inputs.emit("deltanet", buffers, integers, (self.largest_erase,))
