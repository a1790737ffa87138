"""Bases of mechanisms whose state follows the delta rule."""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Annotated, ClassVar, NamedTuple, TypeVar

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from linformer_cli.attention.base import (
    Attention,
    AttentionOptions,
    AttentionShape,
    Chunk,
    Gates,
    Memory,
    Options,
    as_sequence,
)
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


class DeltaAttention(Attention[Options, DeltaState]):
    """y_t = q_t s_t / rms(q_t s_t), plus a bonus, where s_t follows the delta rule."""

    family = "kernel"
    memory = Memory.CONSTANT
    updates_per_position: ClassVar[int] = 1
    compiled = DELTA_RULE

    def __init__(self, options: Options, shape: AttentionShape, chunk: int) -> None:
        """`chunk` is the number of updates per chunk of the parallel form."""
        super().__init__(options, shape)
        self.chunk = chunk

    @abstractmethod
    def prepare(self, q: Tensor, k: Tensor, v: Tensor, gates: Gates) -> DeltaInputs:
        """The inputs of the delta rule for q, k and v of the state's type, and for the gates of T positions."""

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, state: DeltaState | None, gates: Gates
    ) -> tuple[Tensor, DeltaState]:
        dtype = accumulator_dtype(q.dtype)
        x = self.prepare(q.to(dtype), k.to(dtype), v.to(dtype), gates)
        sums, s = delta_sums(x.q, x.updates, None if state is None else state.s, self.chunk)
        count = self.updates_per_position
        return finish(sums[:, :, count - 1 :: count], x.bonus), DeltaState(s)

    def init_state(self, batch: int, capacity: int, device: torch.device, dtype: torch.dtype) -> DeltaState:
        sizes = batch, self.shape.heads, self.shape.key_width, self.shape.value_width
        return DeltaState(torch.zeros(sizes, device=device, dtype=accumulator_dtype(dtype)))

    def _step(
        self, q_t: Tensor, k_t: Tensor, v_t: Tensor, state: DeltaState, gates_t: Gates
    ) -> tuple[Tensor, DeltaState]:
        s = state.s
        q, k, v = (x.to(s.dtype).unsqueeze(2) for x in (q_t, k_t, v_t))
        x = self.prepare(q, k, v, as_sequence(gates_t))
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


GatedOptions = TypeVar("GatedOptions", bound=GatedDeltaOptions)


class GatedDeltaAttention(DeltaAttention[GatedOptions]):
    """y_t = q_t s_t / rms(q_t s_t), where s_t = (I - k_t (b_t * k_t)^T) diag(a_t) s_{t-1} + k_t (w_t * v_t)^T.

    Queries and keys are silu(q) and silu(k), scaled to length 1. The erase gate b_t and the write gate w_t are sigmoids
    of extra scalars. The decay is a_t = sigmoid(x_t + bias), where x_t are extra scalars and the bias is learned.
    Without a write gate, the only erase gate is also the write gate. Without a decay gate, the state does not decay.
    """

    def __init__(self, options: GatedOptions, shape: AttentionShape, gates: Mapping[str, int]) -> None:
        """`gates` has the widths of the gates `erase` (1 or K), `write` (1, V or 0) and `decay` (1, K or 0)."""
        super().__init__(options, shape, options.chunk)
        self.gates = {name: width for name, width in gates.items() if width}
        self.largest_erase = 2.0 if options.negative_eigenvalues else 1.0
        self.gate_bias: nn.Parameter | None = None
        if width := gates["decay"]:
            # Initially, the memory lengths of the heads, or of the rows of s, range from an image down to an image row.
            logs = log_memories(shape, shape.heads if width == 1 else width)
            self.gate_bias = nn.Parameter(logs if width == 1 else logs.repeat(shape.heads, 1))

    def prepare(self, q: Tensor, k: Tensor, v: Tensor, gates: Gates) -> DeltaInputs:
        q, k = directions(functional.silu(q)), directions(functional.silu(k))
        erase = self.largest_erase * gates["erase"].sigmoid()
        log_a = v.new_zeros(1, 1, v.shape[2], 1)
        if self.gate_bias is not None:
            bias = self.gate_bias.to(v.dtype).view(-1, 1, self.gates["decay"])
            log_a = functional.logsigmoid(gates["decay"] + bias)
        if "write" not in gates:
            return DeltaInputs(q, Updates(k, v, erase, log_a))
        written = gates["write"].sigmoid() * v
        return DeltaInputs(q, Updates(k, written, v.new_ones(1, 1, v.shape[2], 1), log_a, erase * k))

    def emit(self, inputs: MixInputs) -> None:
        buffers = (
            inputs.state(self.shape.key_width * self.shape.value_width),
            -1 if self.gate_bias is None else inputs.builder.shared(self.gate_bias),
        )
        erase, write, decay = (self.gates.get(name, 0) for name in ("erase", "write", "decay"))
        integers = (int(erase > 1), write, int(decay > 1))
        inputs.emit("deltanet", buffers, integers, (self.largest_erase,))
