"""Gated DeltaNet (Yang 2024, arXiv 2412.06464): the state decays, and a new value replaces the key's old value."""

import math
from typing import Annotated, Any, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from linformer_cli.native.program import MixInputs

from .base import Attention, AttentionOptions, AttentionShape, Memory, accumulator_dtype
from .kernels import delta as kernels
from .parts.decayed_sums import sum_logs

# The floors are added to the squared lengths of queries and keys, and to the mean squares of outputs. Vectors of zeros
# then stay zero and have finite gradients.
_KEY_FLOOR = 1e-6
_OUTPUT_FLOOR = 1e-5


class DeltanetOptions(AttentionOptions):
    """Options of gated DeltaNet."""

    gate: Annotated[bool, Field(description="decay the state by a gate computed from the input")] = True
    negative_eigenvalues: Annotated[
        bool, Field(description="let beta reach 2, not 1, so that an update can reverse the sign of a stored value")
    ] = False
    chunk: Annotated[int, Field(gt=0, le=65_536, description="positions per chunk of the parallel form")] = 32


class DeltanetState(NamedTuple):
    """s [B, H, K, V], the matrix that maps a key to its value."""

    s: Tensor


class DeltanetAttention(Attention):
    """y_t = q_t s_t / rms(q_t s_t), where s_t = alpha_t (I - beta_t k_t k_t^T) s_{t-1} + beta_t k_t v_t^T.

    Queries and keys are silu(q) and silu(k), scaled to length 1. The bracket removes the fraction beta_t of the value
    that the state holds for the key. The last term adds the same fraction of the new value. beta_t is the sigmoid of
    the head's first extra scalar. alpha_t = sigmoid(x + b) is a gate that decays the whole state. x is the second extra
    scalar, and b is learned for each head. With `gate = false`, alpha_t is 1, which gives the DeltaNet of Yang 2024,
    arXiv 2406.06484. With `negative_eigenvalues`, beta_t is twice the sigmoid (Grazzi 2024, arXiv 2411.12537).

    This is section 3 of the source. Unlike the source's layer, ours has no short convolution of queries, keys and
    values, no output gate and no weights in the norm. The form of alpha is also different.
    """

    name = "deltanet"
    source = "Yang 2024, arXiv 2412.06464"
    family = "kernel"
    method = "delta rule, gated, triangular solves in chunks"
    memory = Memory.CONSTANT
    options_type = DeltanetOptions
    options: DeltanetOptions

    def __init__(self, options: DeltanetOptions, shape: AttentionShape) -> None:
        super().__init__(options, shape)
        self.extra_per_head = 2 if options.gate else 1
        self.gate_bias: nn.Parameter | None = None
        if options.gate:
            # Initially, the memory lengths of the heads range from a whole image down to a row.
            longest, shortest = math.log(shape.positions), math.log(shape.row)
            self.gate_bias = nn.Parameter(torch.linspace(longest, shortest, shape.heads))

    def is_compiled(self, device: torch.device, dtype: torch.dtype) -> bool:
        return kernels.serves(device, accumulator_dtype(dtype))

    def _gates(self, extra: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """beta [B, H, T] and log alpha [B, H, T] (None without a gate) from the extra scalars [B, H, T, E]."""
        if extra is None or extra.shape[-1] != self.extra_per_head:
            found = None if extra is None else list(extra.shape)
            raise ValueError(f"deltanet needs extra scalars [B, H, T, {self.extra_per_head}], found {found}")
        extra = extra.to(dtype)
        beta = extra[..., 0].sigmoid()
        if self.options.negative_eigenvalues:
            beta = 2 * beta
        if self.gate_bias is None:
            return beta, None
        return beta, functional.logsigmoid(extra[..., 1] + self.gate_bias.to(dtype).unsqueeze(-1))

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, state: Any, extra: Tensor | None
    ) -> tuple[Tensor, DeltanetState]:
        dtype = accumulator_dtype(q.dtype)
        with torch.autocast(q.device.type, enabled=False):
            beta, log_alpha = self._gates(extra, dtype)
            if log_alpha is None:
                log_alpha = beta.new_zeros(1, 1, beta.shape[2])
            q, k = _directions(q.to(dtype)), _directions(k.to(dtype))
            s = None if state is None else state.s
            y, s = delta_sums(q, k, v.to(dtype), beta, log_alpha, s, self.options.chunk)
            y = functional.rms_norm(y, y.shape[-1:], eps=_OUTPUT_FLOOR)
        return y.to(v.dtype), DeltanetState(s)

    def init_state(self, batch: int, capacity: int, device: torch.device, dtype: torch.dtype) -> DeltanetState:
        sizes = batch, self.shape.heads, self.shape.key_width, self.shape.value_width
        return DeltanetState(torch.zeros(sizes, device=device, dtype=accumulator_dtype(dtype)))

    @torch.no_grad()
    def step(
        self, q_t: Tensor, k_t: Tensor, v_t: Tensor, state: DeltanetState, extra_t: Tensor | None = None
    ) -> tuple[Tensor, DeltanetState]:
        s = state.s
        with torch.autocast(s.device.type, enabled=False):
            beta, log_alpha = self._gates(None if extra_t is None else extra_t.unsqueeze(2), s.dtype)
            if log_alpha is not None:
                s.mul_(log_alpha.exp().unsqueeze(-1))
            pair = _directions(torch.stack([q_t, k_t], dim=-2).to(s.dtype))
            # The query and the key read the state before the update. The contribution of the update to the output is
            # added afterwards.
            read, held = (pair @ s).unbind(-2)
            written = beta * (v_t.to(s.dtype) - held)
            q, k = pair.unbind(-2)
            s.addcmul_(k.unsqueeze(-1), written.unsqueeze(-2))
            y_t = torch.addcmul(read, (q * k).sum(-1, keepdim=True), written)
            y_t = functional.rms_norm(y_t, y_t.shape[-1:], eps=_OUTPUT_FLOOR)
        return y_t.to(v_t.dtype), state

    def emit(self, inputs: MixInputs) -> None:
        shape, builder = self.shape, inputs.builder
        buffers = (
            builder.state(shape.heads * shape.key_width * shape.value_width),
            -1 if self.gate_bias is None else builder.shared(self.gate_bias),
        )
        largest_beta = 2.0 if self.options.negative_eigenvalues else 1.0
        inputs.emit("deltanet", shape.heads_and_widths, buffers, (), (largest_beta,))


def _directions(x: Tensor) -> Tensor:
    """silu(x) [..., K], scaled to length 1."""
    x = functional.silu(x)
    return x * (x.square().sum(dim=-1, keepdim=True) + _KEY_FLOOR).rsqrt()


def delta_sums(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_alpha: Tensor, carried: Tensor | None, chunk: int
) -> tuple[Tensor, Tensor]:
    """q_t s_t [B, H, T, V] and the last s [B, H, K, V], for q, k [B, H, T, K], v [B, H, T, V], beta [B, H, T].

    log alpha is [B, H, T], or [1, 1, T] if all heads share it. `carried` is s before these positions (None: 0).

    A step adds k_t u_t^T to the decayed state, where u_t = beta_t (v_t - alpha_t s_{t-1}^T k_t). Let S be the state
    before a chunk, and c_t the sum of log alpha from the start of the chunk up to t. Then s_t = e^(c_t) S + sum over j
    <= t of e^(c_t - c_j) k_j u_j^T. The u_t of the chunk therefore solve one unit lower triangular system,

        u_t + beta_t sum over j < t of e^(c_t - c_j) (k_t . k_j) u_j = beta_t v_t - beta_t e^(c_t) S^T k_t

    The systems of all chunks are solved in one call. Solving for the two terms on the right separately gives W and E S,
    where E does not depend on S. If the u_t are the rows of U, then U = W - E S. The state then advances by one product
    with a matrix [K, K] and one sum per chunk. Only these operations are sequential. Keys have length at most 1 and
    beta is at most 2, so no entry of the system's inverse exceeds 2.
    """
    if kernels.serves(q.device, q.dtype):
        return kernels.follow_delta_rule(q, k, v, beta, log_alpha, carried)
    batch, heads, length = q.shape[:3]
    chunk = min(chunk, length)
    chunks = -(-length // chunk)
    fill = chunks * chunk - length
    # In the padding, beta = 0 writes nothing and log alpha = 0 keeps the state.
    q, k, v = (functional.pad(x, (0, 0, 0, fill)).reshape(batch * heads, chunks, chunk, x.shape[-1]) for x in (q, k, v))
    beta, log_alpha = (
        functional.pad(x, (0, fill)).flatten(0, 1).unflatten(1, (chunks, chunk)).unsqueeze(-1)
        for x in (beta, log_alpha)
    )
    c = sum_logs(log_alpha, dim=2)
    later = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).triu(1)
    # The mask is applied before exp, because the difference is positive above the diagonal and exp could overflow.
    weights = (c - c.transpose(-1, -2)).to(q.dtype).masked_fill(later, -math.inf).exp()
    since, until = c.to(q.dtype).exp(), (c[:, :, -1:] - c).to(q.dtype).exp()
    keys, scaled = k.transpose(-1, -2), beta * k
    # The solver reads the matrix only below the diagonal.
    right = torch.cat([beta * v, scaled * since], dim=-1)
    solved = torch.linalg.solve_triangular(scaled @ keys * weights, right, upper=False, unitriangular=True)
    written, erased = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    faded = (k * until).transpose(-1, -2)
    moves = since[:, :, -1:] * torch.eye(k.shape[-1], dtype=k.dtype, device=k.device) - faded @ erased
    s = q.new_zeros(batch * heads, k.shape[-1], v.shape[-1]) if carried is None else carried.flatten(0, 1)
    states = []
    for move, part in zip(moves.unbind(1), (faded @ written).unbind(1), strict=True):
        states.append(s)
        s = torch.baddbmm(part, move, s)
    before = torch.stack(states, dim=1)
    y = (q @ keys * weights) @ (written - erased @ before) + (q * since) @ before
    return y.reshape(batch, heads, chunks * chunk, -1)[:, :, :length], s.unflatten(0, (batch, heads))
