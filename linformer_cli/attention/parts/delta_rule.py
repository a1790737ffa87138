"""The delta rule: before a position adds its value to the state, it erases what the state holds for its key.

    p_t = a_t * s_{t-1},    u_t = beta_t (v_t - d_t^T p_t),    s_t = p_t + k_t u_t^T,    y_t = q_t s_t

s [K, V] maps keys to values. The decay a_t is one number, or one per row of s. d_t, which reads the value to be erased,
is k_t in the plain delta rule.
"""

from abc import abstractmethod
from collections.abc import Mapping
from typing import ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from linformer_cli.attention.base import (
    AttentionOptions,
    AttentionShape,
    Chunk,
    Gates,
    Options,
    Out,
    SumAttention,
    as_sequence,
)
from linformer_cli.attention.kernels.registry import DELTA_RULE, STEP_SUMS, SumsStep, kernel_for
from linformer_cli.attention.tensors import accumulator_dtype
from linformer_cli.documents import setting
from linformer_cli.native.program import NO_BUFFER, MixInputs
from .chunks import cut_chunks
from .memory_lengths import log_memories
from .scaling import KEY_FLOOR, OUTPUT_FLOOR, directions
from .sums import decay_weights, pairwise_products, sum_later, sum_logs


class DeltaState(NamedTuple):
    """s [B, H, K, V], the matrix that maps a key to its value."""

    s: Tensor


class Updates(NamedTuple):
    """What T positions do to the state.

    k is [B, H, T, K], v [B, H, T, V], beta [B, H, T, 1], log a [B, H, T, 1 or K], and d [B, H, T, K] (None: k). beta
    and log a may have length 1 in B or H.
    """

    k: Tensor
    v: Tensor
    beta: Tensor
    log_a: Tensor
    d: Tensor | None = None


def delta_sums(q: Tensor, updates: Updates, carried: Tensor | None, chunk: int) -> tuple[Tensor, Tensor]:
    """Return y [B, H, T, V] and the last s [B, H, K, V], for q [B, H, T, K].

    `carried` is s before these positions (None: 0). `chunk` must be a power of two if a_t has one number per row.

    Let S be the state before a chunk, and c_t the sum of log a in the chunk up to t. Let w(x_t, j) = sum over rows n of
    x_tn k_jn e^(c_tn - c_jn). The u_t of the chunk solve one unit lower triangular system,

        u_t + beta_t sum over j < t of w(d_t, j) u_j = beta_t v_t - beta_t (d_t * e^(c_t))^T S

    The systems of all chunks are solved in one call. Solving for the two terms on the right separately gives W and E S,
    where E does not depend on S. If the u_t are the rows of U, then U = W - E S. The state then advances by one product
    with a matrix [K, K] and one sum per chunk. Only these operations are sequential. No exponential exceeds 1.

    If d is k, keys have length at most 1 and beta is at most 2, then no entry of the system's inverse exceeds 2.
    """
    if follow_delta_rule := kernel_for(DELTA_RULE, q):
        return follow_delta_rule(q, *updates, carried)
    batch, heads, length = q.shape[:3]
    per_row = updates.log_a.shape[-1] > 1
    chunk = min(chunk, 1 << (length - 1).bit_length() if per_row else length)

    def cut(x: Tensor) -> Tensor:
        """Cut x [B, H, T, N] into [B H, chunks, chunk, N]; in padding, beta = 0 writes nothing, log a = 0 keeps s."""
        return cut_chunks(x, chunk).flatten(0, 1)

    q, k, v, beta, log_a = (cut(x) for x in (q, *updates[:4]))
    erase = beta * (k if updates.d is None else cut(updates.d))
    if per_row:
        products, system = pairwise_products(q, k, log_a), pairwise_products(erase, k, log_a)
        since, until = log_a.cumsum(dim=2).exp(), sum_later(log_a).exp()
    else:
        c = sum_logs(log_a, dim=2)
        weights = decay_weights(c.squeeze(-1), q.dtype)
        keys = k.transpose(-1, -2)
        products, system = q @ keys * weights, erase @ keys * weights
        since, until = c.to(q.dtype).exp(), (c[:, :, -1:] - c).to(q.dtype).exp()
    # The solver reads the matrix only below the diagonal.
    right = torch.cat([beta * v, erase * since], dim=-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    written, erased = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    faded = (k * until).transpose(-1, -2)
    moves = (since[:, :, -1] * torch.ones_like(k[:, :, -1])).diag_embed() - faded @ erased
    s = q.new_zeros(batch * heads, k.shape[-1], v.shape[-1]) if carried is None else carried.flatten(0, 1)
    states = []
    for move, part in zip(moves.unbind(1), (faded @ written).unbind(1), strict=True):
        states.append(s)
        s = torch.baddbmm(part, move, s)
    before = torch.stack(states, dim=1)
    y = products @ (written - erased @ before) + (q * since) @ before
    return y.reshape(batch, heads, -1, v.shape[-1])[:, :, :length], s.unflatten(0, (batch, heads))


def delta_step(q: Tensor, updates: Updates, s: Tensor) -> Tensor:
    """Return y [B, H, 1, V] of one position (T = 1); updates s [B, H, K, V] in place."""
    k, v, beta, log_a, d = updates
    if step := kernel_for(STEP_SUMS, s, v):
        beta_t, log_a_t, d_t = (None if x is None else x.squeeze(2) for x in (beta, log_a, d))
        form = SumsStep(log_a_t, None, beta_t, beta_t, d_t, decay_form="log")
        return step(s, q.squeeze(2), k.squeeze(2), v.squeeze(2), form).unsqueeze(2)
    s.mul_(log_a.exp().transpose(-1, -2))
    # q and d read the state before the update. The contribution of the update to the output is added afterwards.
    read, held = (torch.cat([q, k if d is None else d], dim=-2) @ s).split(1, dim=-2)
    u = beta * (v - held)
    s.addcmul_(k.transpose(-1, -2), u)
    return torch.addcmul(read, (q * k).sum(-1, keepdim=True), u)


class DeltaInputs(NamedTuple):
    """The queries [B, H, N T, K] and N updates of T positions, and a bonus [B, H, T, V], added to scaled outputs."""

    q: Tensor
    updates: Updates
    bonus: Tensor | None = None


class DeltaAttention(SumAttention[Options, DeltaState]):
    """y_t = q_t s_t / rms(q_t s_t), plus a bonus, where s_t follows the delta rule."""

    updates_per_position: ClassVar[int] = 1
    compiled = DELTA_RULE

    def __init__(self, options: Options, shape: AttentionShape, chunk: int) -> None:
        """`chunk` is the number of updates per chunk of the parallel form."""
        super().__init__(options, shape)
        self.chunk = chunk

    @abstractmethod
    def prepare(self, q: Tensor, k: Tensor, v: Tensor, gates: Gates) -> DeltaInputs:
        """Return the inputs of the delta rule for q, k and v of the state's type, and for the gates of T positions."""

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, state: DeltaState | None, gates: Gates) -> Out[DeltaState]:
        dtype = accumulator_dtype(q.dtype)
        x = self.prepare(q.to(dtype), k.to(dtype), v.to(dtype), gates)
        sums, s = delta_sums(x.q, x.updates, None if state is None else state.s, self.chunk)
        count = self.updates_per_position
        return finish(sums[:, :, count - 1 :: count], x.bonus), DeltaState(s)

    def init_state(self, batch: int, capacity: int, device: torch.device, dtype: torch.dtype) -> DeltaState:
        sizes = batch, self.shape.heads, self.shape.key_width, self.shape.value_width
        return DeltaState(torch.zeros(sizes, device=device, dtype=accumulator_dtype(dtype)))

    def _step(self, q_t: Tensor, k_t: Tensor, v_t: Tensor, state: DeltaState, gates_t: Gates) -> Out[DeltaState]:
        s = state.s
        q, k, v = (x.to(accumulator_dtype(s.dtype)).unsqueeze(2) for x in (q_t, k_t, v_t))
        x = self.prepare(q, k, v, as_sequence(gates_t))
        for n in range(self.updates_per_position):
            updates = Updates._make(None if part is None else part[:, :, n : n + 1] for part in x.updates)
            sums = delta_step(x.q[:, :, n : n + 1], updates, s)
        return finish(sums, x.bonus).squeeze(2), state


def finish(sums: Tensor, bonus: Tensor | None) -> Tensor:
    """Return sums [B, H, T, V] divided by their root mean square, plus the bonus."""
    y = functional.rms_norm(sums, sums.shape[-1:], eps=OUTPUT_FLOOR)
    return y if bonus is None else y + bonus


class GatedDeltaOptions(AttentionOptions):
    negative_eigenvalues: bool = setting(False, "let erase gates reach 2, so that an update can reverse a sign")
    chunk: Chunk = 32


GatedOptions = TypeVar("GatedOptions", bound=GatedDeltaOptions)


class GatedDeltaAttention(DeltaAttention[GatedOptions]):
    """y_t = q_t s_t / rms(q_t s_t), where s_t = (I - k_t (b_t * k_t)^T) diag(a_t) s_{t-1} + k_t (w_t * v_t)^T.

    Queries and keys are silu(q) and silu(k), scaled to length 1. The erase gate b_t and the write gate w_t (or else
    b_t) are sigmoids of extra scalars, as is the decay a_t = sigmoid(x_t + bias), or else 1, with a learned bias.
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

    def _step(self, q_t: Tensor, k_t: Tensor, v_t: Tensor, state: DeltaState, gates_t: Gates) -> Out[DeltaState]:
        if not (step := kernel_for(STEP_SUMS, state.s, v_t)):
            return super()._step(q_t, k_t, v_t, state, gates_t)
        erase, most = gates_t["erase"], self.largest_erase
        form = SumsStep(
            gates_t.get("decay"),
            None if self.gate_bias is None else self.gate_bias.view(self.shape.heads, -1),
            erase,
            gates_t.get("write", erase),
            most_erased=most,
            most_written=1.0 if "write" in gates_t else most,
            floor=KEY_FLOOR,
            epsilon=OUTPUT_FLOOR,
            decay_form="gate",
        )
        return step(state.s, q_t, k_t, v_t, form), state

    def emit(self, inputs: MixInputs) -> None:
        erase, write, decay = (self.gates.get(name, 0) for name in ("erase", "write", "decay"))
        inputs.emit(
            "deltanet",
            state=inputs.state(self.shape.key_width * self.shape.value_width),
            start=NO_BUFFER if self.gate_bias is None else inputs.builder.shared(self.gate_bias),
            erases_apart=erase > 1,
            writes=write,
            decays_apart=decay > 1,
            largest=self.largest_erase,
        )
