"""Mesa layer (von Oswald 2025, MesaNet, arXiv 2506.05233): the query reads the best linear map from keys to values."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from .base import AttentionOptions, AttentionShape, Chunk, Gates, MixInputs, Out, SumAttention, map_states, setting
from .kernels.registry import MESA_SOLVER, kernel_for
from .parts.memory_lengths import log_memories, of_heads
from .parts.scaling import directions, shrink_huge
from .parts.sums import decayed_causal_sums, update_and_read
from .tensors import Context, accumulator_dtype

_LEAST_RIDGE = 0.25  # the smallest Lambda


class MesaOptions(AttentionOptions):
    iterations: int = setting(
        16, "iterations of conjugate gradients, at most K; each costs as much as linear attention", gt=0, le=1000
    )
    chunk: Chunk = 64


class MesaState(NamedTuple):
    """s [B, H, K, V], the decayed sum of beta_j k_j v_j^T, and h [B, H, K, K], the decayed sum of beta_j k_j k_j^T."""

    s: Tensor
    h: Tensor


class MesaAttention(SumAttention[MesaOptions, MesaState]):
    """y_t = s_t^T (h_t + Lambda)^-1 q_t, with s_t = alpha_t s_{t-1} + beta_t k_t v_t^T and h_t likewise with k_t k_t^T.

    The matrix W = s_t^T (h_t + Lambda)^-1 minimises the sum of |W k_j - v_j|^2 over all positions so far,
    weighted as in h_t, plus the penalty tr(W Lambda W^T). Queries and keys are scaled to length 1.
    beta_t = sigmoid(x_t) and alpha_t = sigmoid(z_t + b), where x_t and z_t are the head's two extra scalars. b and the
    diagonal matrix Lambda are learned for each head. Lambda starts at 1 and is at least 0.25.

    The inverse is applied by a fixed number of iterations of conjugate gradients, which start at 0. K iterations give
    the exact inverse. The gradient is that of the exact inverse; the backward pass applies this inverse with the same
    number of iterations. The formulas are those of the source and of its code in flash-linear-attention.
    """

    name = "mesa"
    source = "von Oswald 2025, arXiv 2506.05233"
    method = "least squares over all positions, conjugate gradients"
    compiled = MESA_SOLVER
    gates = {"write": 1, "decay": 1}

    def __init__(self, options: MesaOptions, shape: AttentionShape) -> None:
        super().__init__(options, shape)
        # After K iterations, the solution is exact, because at most K residuals can be orthogonal.
        self.iterations = min(options.iterations, shape.key_width)
        # At z = 0, the memory lengths of the heads range from a whole image down to a row.
        self.gate_bias = nn.Parameter(log_memories(shape, shape.heads))
        # Lambda = softplus(ridge) + 0.25.
        self.ridge = nn.Parameter(torch.full((shape.heads, shape.key_width), math.log(math.expm1(1 - _LEAST_RIDGE))))

    def _gates(self, gates: Gates, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return beta and log alpha, each [B, H, T], or [B, H] for one position."""
        beta, decay = (gates[name].squeeze(-1) for name in ("write", "decay"))
        return beta.sigmoid(), functional.logsigmoid(decay + of_heads(self.gate_bias, dtype, decay.dim()))

    def _penalty(self, dtype: torch.dtype) -> Tensor:
        """Return the diagonal of Lambda [H, K]."""
        return functional.softplus(self.ridge.to(dtype)) + _LEAST_RIDGE

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, state: MesaState | None, gates: Gates) -> Out[MesaState]:
        dtype = accumulator_dtype(q.dtype)
        s, h = (None, None) if state is None else state
        beta, log_alpha = self._gates(gates, dtype)
        q, k = _directions(q.to(dtype)), _directions(k.to(dtype))
        system = _System(k, beta.unsqueeze(-1) * k, log_alpha, h, self._penalty(dtype), self.options.chunk)
        fixed = system.detach()
        with torch.no_grad():
            solution = fixed.solve(q, self.iterations)
        product, h = system.multiply(solution)
        solution = _Solution.apply(q - product, solution, fixed, self.iterations)
        y, s = decayed_causal_sums(solution, system.written, v.to(dtype), log_alpha, s, self.options.chunk)
        return y, MesaState(s, h)

    def init_state(self, batch: int, capacity: int, device: torch.device, dtype: torch.dtype) -> MesaState:
        heads, K, V = self.shape.heads_and_widths
        s, h = (torch.zeros(batch, heads, K, n, device=device, dtype=accumulator_dtype(dtype)) for n in (V, K))
        return MesaState(s, h)

    def _step(self, q_t: Tensor, k_t: Tensor, v_t: Tensor, state: MesaState, gates_t: Gates) -> Out[MesaState]:
        s, h = state
        beta, log_alpha = (gate.unsqueeze(-1) for gate in self._gates(gates_t, h.dtype))
        q, k = _directions(q_t.to(h.dtype)), _directions(k_t.to(h.dtype))
        written, alpha = beta * k, log_alpha.exp()
        h.mul_(alpha.unsqueeze(-1)).addcmul_(written.unsqueeze(-1), k.unsqueeze(-2))
        penalty = self._penalty(h.dtype)
        solution = _conjugate_gradients(lambda x: (x.unsqueeze(-2) @ h).squeeze(-2) + penalty * x, q, self.iterations)
        return update_and_read(s, solution, written, v_t.to(h.dtype), alpha), state

    def emit(self, inputs: MixInputs) -> None:
        (_, K, V), builder = inputs.sizes, inputs.builder
        inputs.emit(
            "mesa",
            s=inputs.state(K * V),
            h=inputs.state(K * K),
            gate_bias=builder.shared(self.gate_bias),
            penalty=builder.shared(self._penalty(torch.float32)),
            iterations=self.iterations,
        )


def _directions(x: Tensor) -> Tensor:
    """Return x [..., K], scaled to length 1."""
    return directions(shrink_huge(x, (-1,)))


@dataclass(frozen=True)
class _System:
    """The matrices h_t + Lambda of T positions, which are never stored.

    `keys` are k and `written` beta k [B, H, T, K], `log_decay` [B, H, T], `carried` h before the positions (None: 0),
    and `penalty` the diagonal of Lambda [H, K].
    """

    keys: Tensor
    written: Tensor
    log_decay: Tensor
    carried: Tensor | None
    penalty: Tensor
    chunk: int

    def detach(self) -> "_System":
        tensors = (self.keys, self.written, self.log_decay, self.carried, self.penalty)
        return _System(*map_states(Tensor.detach, tensors), self.chunk)

    def multiply(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return (h_t + Lambda) x_t for x [B, H, T, K], and h after the last position [B, H, K, K]."""
        product, h = decayed_causal_sums(x, self.written, self.keys, self.log_decay, self.carried, self.chunk)
        return product + self.penalty.unsqueeze(1) * x, h

    def solve(self, right: Tensor, iterations: int) -> Tensor:
        """Return x [B, H, T, K] with (h_t + Lambda) x_t near `right`, without gradients."""
        if solve := kernel_for(MESA_SOLVER, right):
            return solve(right, self.keys, self.written, self.log_decay, self.carried, self.penalty, iterations)
        return _conjugate_gradients(lambda x: self.multiply(x)[0], right, iterations)


def _conjugate_gradients(multiply: Callable[[Tensor], Tensor], right: Tensor, iterations: int) -> Tensor:
    """Return x [..., K] with multiply(x) near `right`, where `multiply` applies a positive definite matrix [K, K].

    In exact arithmetic, all residuals are orthogonal. Deviations by rounding could grow in every iteration, by up to
    the ratio of two eigenvalues, so each residual is made orthogonal to all earlier ones again. A residual as small as
    a rounding error of `right` counts as 0, as do later steps.
    """
    limits = torch.finfo(right.dtype)
    x, residual, direction = torch.zeros_like(right), right, right
    first = square = right.square().sum(dim=-1, keepdim=True)
    units = right.new_empty(*right.shape[:-1], iterations, right.shape[-1])
    for n in range(iterations):
        product = multiply(direction)
        step = square / (direction * product).sum(dim=-1, keepdim=True).clamp(min=limits.tiny)
        x = x + step * direction
        units[..., n, :] = residual * square.clamp(min=limits.tiny).rsqrt()
        residual, earlier = residual - step * product, units[..., : n + 1, :]
        residual = residual - ((earlier @ residual.unsqueeze(-1)).transpose(-1, -2) @ earlier).squeeze(-2)
        before, square = square, residual.square().sum(dim=-1, keepdim=True)
        converged = square <= limits.eps**2 * first
        residual, square = residual.masked_fill(converged, 0), square.masked_fill(converged, 0)
        direction = residual + square / before.clamp(min=limits.tiny) * direction
    return x


class _Solution(torch.autograd.Function):
    """`solution` [B, H, T, K], whose gradient passes through the inverse of `system` to the residual.

    The residual is right - (h + Lambda) solution for a constant solution: at the exact one, the gradient is exact.
    """

    @staticmethod
    def forward(
        ctx: Context[tuple[_System, int]], residual: Tensor, solution: Tensor, system: _System, iterations: int
    ) -> Tensor:
        ctx.settings = system, iterations
        return solution.view_as(solution)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Context[tuple[_System, int]], *gradients: Tensor) -> tuple[Tensor | None, ...]:
        # Squares of small gradients would underflow.
        scale = gradients[0].abs().amax(dim=-1, keepdim=True).clamp(min=torch.finfo(gradients[0].dtype).tiny)
        system, iterations = ctx.settings
        return system.solve(gradients[0] / scale, iterations) * scale, None, None, None
