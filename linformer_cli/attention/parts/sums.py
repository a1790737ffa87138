"""Sums over features, causal in chunks or over whole sequences: the core of linear attention.

    y_t = sum over j <= t of (phi(q_t) . phi(k_j)) v_j

On CPUs, a compiled kernel visits the positions in order. The plain torch form computes the products of all pairs of
positions within a chunk, under a triangular mask. Earlier chunks enter through one running [C, V] sum per chunk. Time
and memory are linear in T: autograd keeps T * chunk products and T / chunk sums.

With decay, each position multiplies the sum before it by a decay:

    s_t = d_t s_{t-1} + phi(k_t) v_t^T,    y_t = phi(q_t) s_t,    0 <= d_t <= 1

d_t, a gate or a factor that rescales to a new running maximum, is one number, or one number per feature.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from linformer_cli.attention.kernels.registry import CAUSAL_SUMS, STEP_SUMS, SumsStep, kernel_for
from linformer_cli.attention.tensors import Context, fill_padding
from .chunks import corners, cut_chunks, iter_halves, split_halves


def causal_sums(phi_q: Tensor, phi_k: Tensor, v: Tensor, carried: Tensor | None, chunk: int) -> tuple[Tensor, Tensor]:
    """Return y [B, H, T, V] for phi_q, phi_k [B, H, T, C] and v [B, H, T, V], and the last s [B, H, C, V].

    Both include `carried` [B, H, C, V], the sum before these positions (None: 0). A column of ones appended to v gives
    the normaliser phi(q_t) . z_t from the same products.
    """
    if sum_causally := kernel_for(CAUSAL_SUMS, v):
        return sum_causally(phi_q, phi_k, v, None, carried)
    length = phi_q.shape[2]
    # The last chunk is filled up with zero features, which add nothing to any sum.
    queries, keys, values = (cut_chunks(x, min(chunk, length)) for x in (phi_q, phi_k, v))
    y = (queries @ keys.transpose(-1, -2)).tril() @ values
    per_chunk = keys.transpose(-1, -2) @ values
    if carried is not None or per_chunk.shape[2] > 1:
        first = torch.zeros_like(per_chunk[:, :, :1]) if carried is None else carried.unsqueeze(2)
        sums = torch.cat([first, per_chunk], dim=2).cumsum(dim=2)
        y = y + queries @ sums[:, :, :-1]
        total = sums[:, :, -1].clone()  # a view would keep the sums of all chunks in memory
    else:
        total = per_chunk[:, :, 0]
    return y.flatten(2, 3)[:, :, :length], total


def read_whole_sums(phi_q: Tensor, phi_k: Tensor, v: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return phi_q s [B, H, T, V] and phi_q . z [B, H, T], where s and z are the sums over all positions."""
    phi_k = fill_padding(phi_k, lengths)
    weights = phi_q @ phi_k.sum(dim=2).unsqueeze(-1)
    return phi_q @ (phi_k.transpose(-1, -2) @ v), weights.squeeze(-1)


def sum_both_ways(run: Callable[..., Tensor], *x: Tensor) -> Tensor:
    """Return run(*x) plus that for reversed `x` [B, H, T, W], whose padding comes first, is 0 and adds nothing."""
    return run(*x) + run(*(part.flip(2) for part in x)).flip(2)


def update_and_read(s: Tensor, query: Tensor, key: Tensor, value: Tensor, decay: Tensor | None = None) -> Tensor:
    """Multiply s [B, H, C, V] by `decay` [B, H, C], add key value^T, in place, and return query s [B, H, V]."""
    if step := kernel_for(STEP_SUMS, s, value):
        return step(s, query, key, value, SumsStep(decay))
    if decay is not None:
        s.mul_(decay.unsqueeze(-1))
    s.addcmul_(key.unsqueeze(-1), value.unsqueeze(-2))
    return (query.unsqueeze(-2) @ s).squeeze(-2)


def divide_by_weight(numerator: Tensor, weight: Tensor) -> Tensor:
    """Return numerator [..., V] / weight [...], and 0 where the weight is exactly 0."""
    weight = weight.unsqueeze(-1)
    nothing = weight == 0
    return (numerator / torch.where(nothing, torch.ones_like(weight), weight)).masked_fill(nothing, 0)


class _ScanWithDecay(torch.autograd.Function):
    """`scan_with_decay`. The backward pass is a scan in reverse."""

    @staticmethod
    def forward(ctx: Context, parts: Tensor, decay: Tensor, first: Tensor) -> Tensor:
        states = parts.new_empty(len(parts), parts.shape[1] + 1, *parts.shape[2:])
        states[:, 0] = first
        for n in range(parts.shape[1]):
            torch.addcmul(parts[:, n], decay[:, n], states[:, n], out=states[:, n + 1])
        ctx.save_for_backward(states, decay)
        return states

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, *grad_outputs: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        (states, decay), grad = ctx.saved_tensors, grad_outputs[0].clone()
        for n in reversed(range(decay.shape[1])):
            grad[:, n].addcmul_(decay[:, n], grad[:, n + 1])
        wanted = ctx.needs_input_grad[1]
        return grad[:, 1:], (grad[:, 1:] * states[:, :-1]).sum_to_size(decay.shape) if wanted else None, grad[:, 0]


def scan_with_decay(parts: Tensor, decay: Tensor, first: Tensor) -> Tensor:
    """Return states [R, N + 1, C, V]: `first`, then decay[n] states[n] + parts[n], with decay [R, N, C or 1, 1]."""
    return _ScanWithDecay.apply(parts, decay, first)


def decayed_causal_sums(
    phi_q: Tensor,
    phi_k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    carried: Tensor | None,
    chunk: int,
    factors: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return y [B, H, T, V] and the last s [B, H, C, V] for phi_q, phi_k [.., T, C], v [.., T, V], log d [B|1, H, T].

    `carried` is s before these positions. Weights inside a chunk are exp(c_t - c_j), where c is the sum of log d from
    the start of the chunk, and never a quotient of two numbers that can underflow.

    With `factors` [T, F], `multiply_features` is applied to phi_q and phi_k first, and s is [B, H, F C, V]. The
    pairwise products inside a chunk cost no more.
    """
    if sum_causally := kernel_for(CAUSAL_SUMS, v):
        if factors is not None:
            phi_q, phi_k = multiply_features(phi_q, factors), multiply_features(phi_k, factors)
        return sum_causally(phi_q, phi_k, v, log_decay.unsqueeze(-1), carried)
    length = phi_q.shape[2]
    chunk = min(chunk, length)
    # In the padding, zeros add nothing and decay nothing.
    queries, keys, values, log_decay = (cut_chunks(x, chunk) for x in (phi_q, phi_k, v, log_decay.unsqueeze(-1)))
    c = sum_logs(log_decay.squeeze(-1), dim=-1)
    weights = decay_weights(c, v.dtype)
    if factors is not None:
        factors = cut_chunks(factors.view(1, 1, *factors.shape), chunk)
        weights = weights * (factors @ factors.transpose(-1, -2))
    y = (queries @ keys.transpose(-1, -2) * weights) @ values
    if factors is not None:
        queries, keys = multiply_features(queries, factors), multiply_features(keys, factors)
    until, since = (x.to(v.dtype).exp().unsqueeze(-1) for x in (c[..., -1:] - c, c))
    parts = keys.transpose(-1, -2) @ (values * until)
    states = _scan_chunks(parts, since[..., -1:, :], carried)
    y = y + (queries @ states[:, :, :-1]) * since
    # This is a copy, because a view would keep the states of all chunks in memory.
    return y.flatten(2, 3)[:, :, :length], states[:, :, -1].clone()


def sum_logs(logs: Tensor, dim: int) -> Tensor:
    """Running sums of `logs` from the start of a chunk, in float64 where the device has it.

    Large sums, after almost closed gates, have small differences. `cumsum` with a `dtype` sums gradients in float32.
    """
    return (logs if logs.device.type == "mps" else logs.double()).cumsum(dim=dim)


def decay_weights(c: Tensor, dtype: torch.dtype) -> Tensor:
    """Return exp(c_t - c_j) [.., R, R] in type `dtype` for j <= t, else 0, for logs c [.., R] that do not increase."""
    return _DecayWeights.apply(c, dtype)


class _DecayWeights(torch.autograd.Function):
    """`decay_weights`. Only the result is saved.

    The gradient is summed in the type of c. Summed over later positions, it is that of log d, where pairs that do not
    pass a position cancel, and rounding errors would remain.
    """

    @staticmethod
    def forward(ctx: Context[torch.dtype], c: Tensor, dtype: torch.dtype) -> Tensor:
        # Above the diagonal, the difference is positive and exp could overflow.
        weights = (c.unsqueeze(-1) - c.unsqueeze(-2)).to(dtype).clamp_(max=0).exp_().tril_()
        ctx.save_for_backward(weights)
        ctx.settings = c.dtype
        return weights

    @staticmethod
    @once_differentiable
    def backward(ctx: Context[torch.dtype], *grad_outputs: Tensor) -> tuple[Tensor, None]:
        products = grad_outputs[0] * ctx.saved_tensors[0]
        return products.sum(dim=-1, dtype=ctx.settings) - products.sum(dim=-2, dtype=ctx.settings), None


def multiply_features(features: Tensor, factors: Tensor) -> Tensor:
    """Return all products [..., F C] of the features [..., C] and the factors [..., F] of a position."""
    return (factors.unsqueeze(-1) * features.unsqueeze(-2)).flatten(-2)


def featurewise_decayed_causal_sums(
    phi_q: Tensor, phi_k: Tensor, v: Tensor, log_decay: Tensor, carried: Tensor | None, chunk: int
) -> tuple[Tensor, Tensor]:
    """As `decayed_causal_sums`, but with one decay per feature, log d [B, H, T, C]; `chunk` is a power of two.

    Weights are part of the product of query and key. No exponential exceeds 1; see `pairwise_products`.
    """
    if sum_causally := kernel_for(CAUSAL_SUMS, v):
        return sum_causally(phi_q, phi_k, v, log_decay, carried)
    length = phi_q.shape[2]
    while chunk >= 2 * length:
        chunk //= 2
    queries, keys, values, log_decay = (cut_chunks(x, chunk) for x in (phi_q, phi_k, v, log_decay))
    y = pairwise_products(queries, keys, log_decay) @ values
    until, since = sum_later(log_decay).exp(), log_decay.cumsum(dim=-2).exp()
    parts = (keys * until).transpose(-1, -2) @ values
    states = _scan_chunks(parts, since[..., -1:, :].transpose(-1, -2), carried)
    y = y + (queries * since) @ states[:, :, :-1]
    return y.flatten(2, 3)[:, :, :length], states[:, :, -1].clone()


def _scan_chunks(parts: Tensor, decay: Tensor, carried: Tensor | None) -> Tensor:
    """`scan_with_decay` over the chunks of parts [B, H, N, C, V] with decay [B or 1, H, N, C or 1, 1]."""
    first = torch.zeros_like(parts[:, :, 0]) if carried is None else carried
    decay = decay.expand(len(parts), -1, -1, -1, -1)
    return scan_with_decay(*(x.flatten(0, 1) for x in (parts, decay, first))).unflatten(0, parts.shape[:2])


def sum_later(logs: Tensor) -> Tensor:
    """Return the sums of `logs` [..., R, C] over later positions. With one sum per feature, float64 would be slow."""
    return functional.pad(logs[..., 1:, :].flip(-2).cumsum(dim=-2).flip(-2), (0, 0, 0, 1))


def pairwise_products(q: Tensor, k: Tensor, log_decay: Tensor) -> Tensor:
    """Return a[t, j] = sum over features of q_t k_j w_tj for j <= t, else 0; q, k, log d [..., R, C], a [..., R, R].

    w_tj is the product of d over positions j + 1 to t, and R a power of two. In pieces of 2, 4, .. R positions, queries
    of the second half are multiplied by keys of the first half. For these pairs, w_tj = w_tm w_mj, where m is the last
    position of the first half. Neither factor exceeds 1 or underflows unless the product does. Factors are not saved.
    """
    return _PairwiseProducts.apply(q, k, log_decay)


class _PairwiseProducts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, q: Tensor, k: Tensor, log_decay: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, log_decay)
        products = q.new_zeros(*q.shape[:-1], q.shape[-2])
        products.diagonal(dim1=-2, dim2=-1).copy_((q * k).sum(dim=-1))
        for half in iter_halves(q.shape[-2]):
            late, early, _, _ = _faded_halves(q, k, log_decay, half)
            corners(products, half).copy_(late @ early.transpose(-1, -2))
        return products

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        (q, k, log_decay), (grad,) = ctx.saved_tensors, grad_outputs
        grad_q, grad_k, grad_decay = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(log_decay)
        for half in iter_halves(q.shape[-2]):
            late, early, late_factor, early_factor = _faded_halves(q, k, log_decay, half)
            pairs = corners(grad, half)
            of_late, of_early = pairs @ early, pairs.transpose(-1, -2) @ late
            split_halves(grad_q, half)[1].addcmul_(of_late, late_factor)
            split_halves(grad_k, half)[0].addcmul_(of_early, early_factor)
            # A gate of the second half belongs to the pairs of this and later queries, and a gate of the first half to
            # those of earlier keys. The own pair (t, t) has no gate.
            before, after = split_halves(grad_decay, half)
            after.add_((of_late * late).flip(-2).cumsum(dim=-2).flip(-2))
            before[..., 1:, :].add_((of_early * early)[..., :-1, :].cumsum(dim=-2))
        own = grad.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
        return grad_q.addcmul_(own, k), grad_k.addcmul_(own, q), grad_decay


def _faded_halves(q: Tensor, k: Tensor, log_decay: Tensor, half: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return each piece's later queries and earlier keys, decayed to the border of its halves, and both factors."""
    queries, keys = split_halves(q, half)[1], split_halves(k, half)[0]
    first, second = split_halves(log_decay, half)
    late, early = second.cumsum(dim=-2).exp_(), sum_later(first).exp_()
    return queries * late, keys * early, late, early
