"""One softmax over several sets of keys, such as windows and global positions, computed set by set.

The result for one set of keys is a part [..., V + 2]. Let m be the largest score of a query in the set. The columns of
the part are the sum of exp(score - m) v_j, the sum of exp(score - m), and m. `join` turns parts into outputs.

In `weigh_lists`, groups of queries share a list of keys, such as a block and its neighbours.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from linformer_cli.attention.tensors import Context, find_padding

from .chunks import cut_chunks

# The largest number of scores of a head that are usually kept for the backward pass.
SCORES_KEPT = 2**18


def run_within(limit: int, scores: int, run: Callable[..., Tensor], *x: Tensor) -> Tensor:
    """run(*x), which computes `scores` scores. If these are more than `limit`, only `x` is saved.

    The backward pass then calls `run` again, and the result can be differentiated once. This is equivalent to
    `torch.utils.checkpoint`, whose import takes seconds.
    """
    if scores <= limit or not torch.is_grad_enabled():
        return run(*x)
    return _Recomputed.apply(run, *x)


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context[Callable[..., Tensor]], run: Callable[..., Tensor], *x: Tensor) -> Tensor:
        ctx.settings = run
        ctx.save_for_backward(*x)
        return run(*x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context[Callable[..., Tensor]], gradient: Tensor) -> tuple[Tensor | None, ...]:
        leaves = [x.detach().requires_grad_() for x in ctx.saved_tensors]
        with torch.enable_grad(), torch.autocast(gradient.device.type, enabled=False):
            y = ctx.settings(*leaves)
        return None, *torch.autograd.grad(y, leaves, gradient)


def weigh(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None) -> Tensor:
    """The part [..., R, V + 2] of scaled queries [..., R, K] for keys [..., S, K] and values [..., S, V].

    `hidden` is True for the keys that a query does not see. A query may see no key.
    """
    scores = q.shape[2:-1].numel() * k.shape[-2]
    return run_within(SCORES_KEPT, scores, functools.partial(weigh_once, hidden), q, k, v)


def weigh_once(hidden: Tensor | None, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """`weigh` without the recomputation in the backward pass."""
    scores = q @ k.transpose(-1, -2)
    if hidden is not None:
        scores = scores.masked_fill(hidden, -math.inf)
    # The maximum of no keys is minus infinity, which would give NaN.
    top = scores.detach().amax(dim=-1, keepdim=True).clamp(min=torch.finfo(scores.dtype).min)
    weights = (scores - top).exp()
    return torch.cat([weights @ v, weights.sum(dim=-1, keepdim=True), top], dim=-1)


def join(parts: Sequence[Tensor]) -> Tensor:
    """Outputs [..., V] of the softmax over all sets of keys; 0 for a query that sees no key."""
    tops = torch.stack([part[..., -1:].detach() for part in parts])
    scales = (tops - tops.amax(dim=0)).exp()
    sums = torch.stack([part[..., :-1] * scale for part, scale in zip(parts, scales, strict=True)]).sum(dim=0)
    total = sums[..., -1:]
    return sums[..., :-1] / total.masked_fill(total == 0, 1)


def join_globals(part: Tensor, q: Tensor, k: Tensor, v: Tensor, count: int, lengths: Tensor | None) -> Tensor:
    """Outputs [B, H, T, V] for the `part` [B, H, T, V + 2] of other keys, with the first `count` positions global.

    All queries see the global keys, and the queries of global positions see all keys. The part must not contain global
    keys.
    """
    if count == 0:
        return join([part])
    hidden = None if lengths is None else find_padding(lengths, q.shape[2])[:, None, None]
    to_first = weigh(q, k[:, :, :count], v[:, :, :count], None if hidden is None else hidden[..., :count])
    from_first = join([weigh(q[:, :, :count], k, v, hidden)])
    return torch.cat([from_first, join([part, to_first])[:, :, count:]], dim=2)


# Blocks shorter than this cost more overhead than they save in products.
SHORTEST_BLOCK = 16


class Lists(NamedTuple):
    """Groups of R queries, each with a list of S keys, by their positions.

    queries is int64 [groups, R] and holds every position once. keys is int64 [H or 1, groups, S]. Numbers that are not
    positions are ignored. `hidden` (bool, [H or 1, groups or 1, R or 1, S]) is True for the keys that a query does not
    see.
    """

    queries: Tensor
    keys: Tensor
    hidden: Tensor


def weigh_lists(q: Tensor, k: Tensor, v: Tensor, lists: Lists, lengths: Tensor | None) -> Tensor:
    """The part [B, H, T, V + 2], as defined above, of scaled queries [B, H, T, K] for their lists of keys."""
    ends = q.shape[2] if lengths is None else lengths.view(-1, 1, 1, 1)
    keys = lists.keys.unsqueeze(0)
    hidden = lists.hidden | ((keys < 0) | (keys >= ends)).unsqueeze(-2)
    scores = lists.queries.numel() * lists.keys.shape[-1]
    return run_within(SCORES_KEPT, scores, functools.partial(_gather_and_weigh, lists, hidden), q, k, v)


def _gather_and_weigh(lists: Lists, hidden: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    part: Tensor = weigh_once(
        hidden, _gather(q, lists.queries.unsqueeze(0)), _gather(k, lists.keys), _gather(v, lists.keys)
    )
    part = part.flatten(2, 3)
    return part.index_select(2, lists.queries.flatten().argsort()[: q.shape[2]])


def _gather(x: Tensor, rows: Tensor) -> Tensor:
    """[B, H, groups, S, W] for x [B, H, T, W] and rows [H or 1, groups, S]."""
    heads, length = x.shape[1:3]
    at = rows.clamp(0, length - 1) + torch.arange(heads, device=x.device).view(-1, 1, 1) * length
    return x.flatten(1, 2).index_select(1, at.flatten()).unflatten(1, at.shape)


def list_windows(length: int, reach: int, dilation: int, device: torch.device) -> Lists:
    """Position t sees t + i `dilation` for the whole numbers i from -reach to reach.

    Within one residue class of positions mod dilation, a window is contiguous. The positions of a class are cut into
    blocks that share their keys.
    """
    per_class = math.ceil(length / dilation)
    block = min(per_class, max(reach, SHORTEST_BLOCK))
    residue = torch.arange(dilation, device=device).view(-1, 1, 1)
    start = torch.arange(0, per_class, block, device=device).unsqueeze(-1)
    place, offset = (torch.arange(-side, block + side, device=device) for side in (0, reach))
    queries, keys = ((residue + dilation * (start + x)).flatten(0, 1) for x in (place, offset))
    hidden = (offset - place.unsqueeze(-1)).abs() > reach
    return Lists(queries, keys.unsqueeze(0), hidden[None, None])


def list_blocks(length: int, block: int, before: int, after: int, device: torch.device) -> Lists:
    """Every position sees its block of `block` positions, `before` positions before it and `after` positions after."""
    start = torch.arange(0, length, block, device=device).unsqueeze(-1)
    queries = start + torch.arange(block, device=device)
    keys = start + torch.arange(-before, block + after, device=device)
    return Lists(queries, keys.unsqueeze(0), torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=device))


def list_near(near: Tensor, symmetric: bool, stride: int, length: int) -> Lists:
    """The near positions: those that `near` [stride, stride] allows in a block, or those within less than `stride`."""
    side = stride if symmetric else 0
    rows = list_blocks(length, stride, side, side, near.device)
    distance = (rows.queries[0].unsqueeze(1) - rows.keys[0, 0]).abs()
    return rows._replace(hidden=(distance >= stride if symmetric else ~near)[None, None])


def weigh_columns(q: Tensor, k: Tensor, v: Tensor, stride: int, lengths: Tensor | None) -> Tensor:
    """The part [B, H, T, V + 2], as defined above, of the other positions t + i `stride`, for whole numbers i."""
    length = q.shape[2]
    rows = -(-length // stride)
    queries, keys, values = (cut_chunks(x, stride).transpose(2, 3) for x in (q, k, v))
    hidden = _hide_padding(q, rows * stride, lengths).unflatten(1, (rows, stride)).transpose(1, 2)
    own = torch.eye(rows, dtype=torch.bool, device=q.device)
    part = weigh(queries, keys, values, hidden[:, None, :, None] | own).transpose(2, 3)
    return part.flatten(2, 3)[:, :, :length]


def weigh_summaries(q: Tensor, k: Tensor, v: Tensor, sizes: tuple[int, int], lengths: Tensor | None) -> Tensor:
    """The part [B, H, T, V + 2] of the last c positions in every other block of l positions; `sizes` are l and c."""
    stride, summary = sizes
    length = q.shape[2]
    blocks = -(-length // stride)
    keys, values = (cut_chunks(x, stride)[:, :, :, -summary:].flatten(2, 3) for x in (k, v))
    hidden = _hide_padding(q, blocks * stride, lengths).unflatten(1, (blocks, stride))[..., -summary:].flatten(1)
    block = torch.arange(length, device=q.device) // stride
    own = block.unsqueeze(1) == torch.arange(blocks, device=q.device).repeat_interleave(summary)
    return weigh(q, keys, values, hidden[:, None, None] | own)


def _hide_padding(q: Tensor, positions: int, lengths: Tensor | None) -> Tensor:
    """True for padding, bool [B or 1, positions]."""
    return find_padding(torch.tensor([q.shape[2]], device=q.device) if lengths is None else lengths, positions)
