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

from linformer_cli.attention.tensors import Context
from .caches import attend_masked

SCORES_KEPT = 2**18  # the most scores of a head that are usually kept for the backward pass
_GATHERED = 32  # how many times the keys of a sequence may be gathered at once


def run_within(limit: int, scores: int, run: Callable[..., Tensor], *x: Tensor) -> Tensor:
    """Call run(*x), of `scores` scores. Above `limit`, save only `x`, as `torch.utils.checkpoint`, a slow import."""
    return run(*x) if scores <= limit or not torch.is_grad_enabled() else _Recomputed.apply(run, *x)


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
    """Return the part [.., R, V + 2] of scaled q [.., R, K] for k [.., S, K] and v [.., S, V] but the `hidden` ones."""
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
    """Return outputs [..., V] of the softmax over all sets of keys; 0 for a query that sees no key."""
    tops = torch.stack([part[..., -1:].detach() for part in parts])
    scales = (tops - tops.amax(dim=0)).exp()
    sums = torch.stack([part[..., :-1] * scale for part, scale in zip(parts, scales, strict=True)]).sum(dim=0)
    total = sums[..., -1:]
    return sums[..., :-1] / total.masked_fill(total == 0, 1)


class Lists(NamedTuple):
    """Groups of R queries int64 [groups, R], each with a list of S keys int64 [H or 1, groups, S], by their positions.

    Every position is a query once. Numbers that are not positions are ignored. `hidden` (bool, [H or 1, groups or 1,
    R or 1, S]) is True for the keys that a query does not see.
    """

    queries: Tensor
    keys: Tensor
    hidden: Tensor

    def places(self, length: int) -> Tensor:
        """Return where each of T queries is among all places of the groups, int64 [T]."""
        queries = self.queries.flatten()
        return queries.masked_fill(queries < 0, length).argsort()[:length]


def weigh_lists(q: Tensor, k: Tensor, v: Tensor, lists: Lists, lengths: Tensor | None) -> Tensor:
    """Return the part [B, H, T, V + 2], as defined above, of scaled queries [B, H, T, K] for their lists of keys."""
    ends = k.shape[2] if lengths is None else lengths.view(-1, 1, 1, 1)
    keys = lists.keys.unsqueeze(0)
    hidden = lists.hidden | ((keys < 0) | (keys >= ends)).unsqueeze(-2)
    groups, scores = len(lists.queries), lists.queries.shape[1] * lists.keys.shape[2]
    at_once = max(1, SCORES_KEPT // scores)
    parts = [
        run_within(SCORES_KEPT, groups * scores, functools.partial(_gather_and_weigh, *some), q, k, v)
        for some in zip(
            lists.queries.split(at_once),
            lists.keys.split(at_once, dim=1),
            hidden.expand(-1, -1, groups, -1, -1).split(at_once, dim=2),
            strict=True,
        )
    ]
    part = parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
    return part.flatten(2, 3).index_select(2, lists.places(q.shape[2]))


def attend_lists(q: Tensor, k: Tensor, v: Tensor, lists: list[Lists], lengths: Tensor | None = None) -> Tensor:
    """Return the softmax averages [B, H, T, V] over all lists of queries [B, H, T, K]. Every query must see a key."""
    only = lists[0]
    # torch's attention saves the gathered keys and the mask, and all scores if keys and values differ in width.
    many = len(only.queries) * only.keys.shape[2] > _GATHERED * q.shape[2] or only.hidden.numel() > q.nbytes
    if many or len(lists) > 1 or lengths is not None or q.shape[-1] != v.shape[-1]:
        return join([weigh_lists(q * q.shape[-1] ** -0.5, k, v, each, lengths) for each in lists])
    queries = gather_rows(q, only.queries.unsqueeze(0)).flatten(0, 1)
    keys, values = (gather_rows(x, only.keys).flatten(0, 1) for x in (k, v))
    mask = ~only.hidden
    y = attend_masked(queries, keys, values, mask if len(mask) == 1 else mask.repeat(len(q), 1, 1, 1))
    return y.flatten(1, 2).index_select(1, only.places(q.shape[2])).unflatten(0, q.shape[:2])


def _gather_and_weigh(queries: Tensor, keys: Tensor, hidden: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return weigh_once(hidden, gather_rows(q, queries.unsqueeze(0)), gather_rows(k, keys), gather_rows(v, keys))


def gather_rows(x: Tensor, rows: Tensor) -> Tensor:
    """Return [B, H, groups, S, W] for x [B, H, T, W] and rows [H or 1, groups, S]."""
    heads, length = x.shape[1:3]
    at = rows.clamp(0, length - 1) + torch.arange(heads, device=x.device).view(-1, 1, 1) * length
    return x.flatten(1, 2).index_select(1, at.flatten()).unflatten(1, at.shape)
