"""Sums over the buckets of a Fenwick tree: a running sum in log2(T) parts, each read with its own weight.

Position t belongs to bucket b at time t' > t if b is the highest bit in which t and t' differ. Bit b of t' therefore
stands for a bucket of 2^b positions, and the buckets of lower bits hold later positions. Level 0 is the position
itself, and level b + 1 is bucket b. A new position is merged with the buckets of the trailing 1 bits, like a carry.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from linformer_cli.attention.tensors import Context
from .chunks import corners, iter_halves, split_halves
from .sums import decay_weights, sum_logs


class LevelInputs(NamedTuple):
    """The inputs of a sum: [B, H, T, ..] or, for a single position, [B, H, ..].

    Every bucket S [K, V] follows S <- a (I - r k k^T) S, and the position itself adds k v^T. None for `log_decay` is
    a = 1, and None for `rate` is r = 0; a rate needs a decay. `scales` [.., L] are the weights of levels, the last also
    that of higher levels.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scales: Tensor
    log_decay: Tensor | None = None
    rate: Tensor | None = None


class _Chunks(NamedTuple):
    """What N chunks of R positions contribute, before the weights of the levels are applied; all [B, H, N, R, ..].

    For the state S before a chunk, the output at t is the sum of pairs[t, j] v_j plus queries[t] S, and the state after
    it is move S + keys^T v, with `move` [B, H, N, K or 1, K or 1] (None: 1). Only j <= t counts.
    """

    pairs: Tensor
    queries: Tensor
    keys: Tensor
    move: Tensor | None


def count_buckets(positions: int) -> int:
    return positions.bit_length()


def count_carries(position: int) -> int:
    """Count the buckets that `position` is merged with, which is also the number of the bucket that it goes to."""
    return (~position & (position + 1)).bit_length() - 1


def read_levels(x: LevelInputs, s: Tensor, position: int, chunk: int) -> tuple[Tensor, Tensor]:
    """Weighted sums [B, H, T, V] and the buckets [B, H, G, K, V] after T positions; an empty bucket is 0.

    `s` holds the buckets of the first `position` positions, and G is at least `count_buckets` after T more. They are
    cut into aligned pieces of powers of two, up to `chunk`; all of that length are processed at once.
    """
    length, levels = x.q.shape[2], s.shape[2] + 1
    missing = levels - x.scales.shape[-1]
    last = x.scales[..., -1:].expand(*x.scales.shape[:-1], max(missing, 0))
    x = x._replace(scales=torch.cat([x.scales[..., :levels], last], dim=-1) if missing else x.scales)
    done, outputs = 0, []
    while done < length:
        at, left = position + done, length - done
        size = min(chunk, 1 << (left.bit_length() - 1), at & -at or chunk)
        count = left // size if size == chunk else 1
        stop = done + count * size
        piece = [None if part is None else part[:, :, done:stop].unflatten(2, (count, size)) for part in x]
        y, s = _read_chunks(LevelInputs._make(piece), s, at // size)
        outputs.append(y.flatten(2, 3))
        done = stop
    return torch.cat(outputs, dim=2), s


def _read_chunks(x: LevelInputs, s: Tensor, first: int) -> tuple[Tensor, Tensor]:
    """`read_levels` for whole chunks [B, H, N, R, ..]; `first` is the number of chunks before these."""
    count, size = x.q.shape[2:4]
    lowest, highest = size.bit_length() - 1, (first + count - 1).bit_length()
    chunks = _describe_chunks(x)
    y = _ReadPairs.apply(chunks.pairs, x.scales, x.v)
    # Before a chunk, the buckets that are smaller than a chunk are empty.
    empty, s = s[:, :, :lowest], s[:, :, lowest:]
    states = []
    # `split` rather than slices, because the gradient of a slice is as large as the whole tensor.
    moves = None if chunks.move is None else chunks.move.split(1, dim=2)
    for n, write in enumerate((chunks.keys.transpose(-1, -2) @ x.v).split(1, dim=2)):
        states.append(s[:, :, :highest].movedim(2, 0))
        if moves is not None:
            s = moves[n] * s if moves[n].shape[-1] == 1 else moves[n] @ s
        carries = count_carries(first + n)
        merged = torch.cat([write, s[:, :, :carries]], dim=2).sum(dim=2, keepdim=True)
        s = torch.cat([torch.zeros_like(s[:, :, :carries]), merged, s[:, :, carries + 1 :]], dim=2)
    if highest:
        scales = x.scales[..., lowest + 1 : lowest + 1 + highest]
        y = y + _ReadBuckets.apply(chunks.queries, scales, torch.stack(states, dim=3))
    return y, torch.cat([empty, s], dim=2)


def _describe_chunks(x: LevelInputs) -> _Chunks:
    keys = x.k.transpose(-1, -2)
    if x.log_decay is None:
        return _Chunks(x.q @ keys, x.q, x.k, None)
    c = sum_logs(x.log_decay, dim=-1)
    weights = decay_weights(c, x.q.dtype)
    c = c.unsqueeze(-1)
    since, until = (part.to(x.q.dtype).exp() for part in (c, c[..., -1:, :] - c))
    pairs, queries, faded, move = x.q @ keys * weights, x.q * since, x.k * until, since[..., -1:, :]
    if x.rate is None:
        return _Chunks(pairs, queries, faded, move)
    # Later positions of the chunk erase a part of each v. What remains is given by the inverse of a triangular matrix;
    # see `delta_sums` of delta_rule.py. The solver reads this matrix only below the diagonal.
    scaled = x.rate.unsqueeze(-1) * x.k
    wanted = torch.cat([pairs, faded.transpose(-1, -2)], dim=-2)
    solved = torch.linalg.solve_triangular(scaled @ keys * weights, wanted, upper=False, left=False, unitriangular=True)
    erased = solved @ (scaled * since)
    pairs, faded = solved.split([x.q.shape[3], x.k.shape[-1]], dim=-2)
    of_queries, of_state = erased.split([x.q.shape[3], x.k.shape[-1]], dim=-2)
    identity = torch.eye(x.k.shape[-1], dtype=x.k.dtype, device=x.k.device)
    return _Chunks(pairs, queries - of_queries, faded.transpose(-1, -2), move * identity - of_state)


class _ReadPairs(torch.autograd.Function):
    """y [.., R, V], where y_t is the sum over j <= t of pairs[t, j] times the weight of its level times v_j.

    The level of t and j is the number of bits up to the highest in which they differ, and `scales` [.., R, L] has the
    weights of levels at t. Only the inputs are saved.
    """

    @staticmethod
    def forward(ctx: Context, pairs: Tensor, scales: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(pairs, scales, v)
        return _weigh(pairs, scales) @ v

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        (pairs, scales, v), (grad_y,) = ctx.saved_tensors, grad_outputs
        grad, grad_scales = grad_y @ v.transpose(-1, -2), torch.zeros_like(scales)
        torch.mul(*(part.diagonal(dim1=-2, dim2=-1) for part in (grad, pairs)), out=grad_scales[..., 0])
        for level, half in enumerate(iter_halves(pairs.shape[-1]), 1):
            products = corners(grad, half) * corners(pairs, half)
            split_halves(grad_scales[..., level : level + 1], half)[1].copy_(products.sum(dim=-1, keepdim=True))
        return _weigh(grad, scales), grad_scales, _weigh(pairs, scales).transpose(-1, -2) @ grad_y


def _weigh(pairs: Tensor, scales: Tensor) -> Tensor:
    """Return each of `pairs` [.., R, R] times the weight of its level, and 0 above the diagonal."""
    weighed = torch.zeros_like(pairs)
    torch.mul(pairs.diagonal(dim1=-2, dim2=-1), scales[..., 0], out=weighed.diagonal(dim1=-2, dim2=-1))
    for level, half in enumerate(iter_halves(pairs.shape[-1]), 1):
        weights = split_halves(scales[..., level : level + 1], half)[1]
        torch.mul(corners(pairs, half), weights, out=corners(weighed, half))
    return weighed


class _ReadBuckets(torch.autograd.Function):
    """The sum over buckets g of scales[.., g] q S_g, for q [.., R, K] and S [G, .., K, V]. Only inputs are saved."""

    @staticmethod
    def forward(ctx: Context, queries: Tensor, scales: Tensor, s: Tensor) -> Tensor:
        ctx.save_for_backward(queries, scales, s)
        y = queries.new_zeros(*queries.shape[:-1], s.shape[-1])
        for scale, bucket in zip(scales.split(1, dim=-1), s, strict=True):
            y.addcmul_(scale, queries @ bucket)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        (queries, scales, s), (grad_y,) = ctx.saved_tensors, grad_outputs
        grad_queries, grad_scales, grad_s = torch.zeros_like(queries), torch.empty_like(scales), torch.empty_like(s)
        for g, (scale, bucket) in enumerate(zip(scales.split(1, dim=-1), s, strict=True)):
            torch.matmul(queries.transpose(-1, -2), scale * grad_y, out=grad_s[g])
            back = grad_y @ bucket.transpose(-1, -2)
            grad_queries.addcmul_(scale, back)
            grad_scales[..., g] = (back * queries).sum(dim=-1)
        return grad_queries, grad_scales, grad_s


def step_levels(x: LevelInputs, s: Tensor, position: int | Tensor) -> tuple[Tensor, Tensor]:
    """`read_levels` for one position [B, H, ..], in place unless all buckets are full. All steps do the same work.

    If `position` is a tensor on the device of s, the host does not read it, and s must have room.
    """
    if not isinstance(position, Tensor):
        if count_carries(position) == s.shape[2]:
            s = functional.pad(s, (0, 0, 0, 0, 0, 1))
        position = torch.full((), position, device=s.device)
    if x.log_decay is not None:
        s.mul_(x.log_decay.exp()[..., None, None, None])
    query, key = (part.unsqueeze(2).unsqueeze(-2) for part in (x.q, x.k))
    if x.rate is not None:
        s.sub_((x.rate[..., None, None, None] * key).transpose(-1, -2) * (key @ s))
    buckets = torch.arange(s.shape[2], device=s.device)
    scales = x.scales[..., (buckets + 1).clamp(max=x.scales.shape[-1] - 1)]
    own = x.scales[..., :1] * (x.q * x.k).sum(dim=-1, keepdim=True) * x.v
    y = own + (scales.unsqueeze(-2) @ (query @ s).squeeze(-2)).squeeze(-2)
    full = 2**buckets < (~position & (position + 1))
    merged = full.to(s.dtype) @ s.flatten(-2)
    merged = merged.unflatten(-1, s.shape[-2:]).addcmul_(x.k.unsqueeze(-1), x.v.unsqueeze(-2))
    s.masked_fill_(full.view(-1, 1, 1), 0).index_copy_(2, full.sum().view(1), merged.unsqueeze(2))
    return y, s
