"""One softmax over the keys near a query and over compressed rows of earlier blocks.

    y_t = softmax over { near keys t - window < j <= t } and { the first floor(t / span) * rank rows }

Near keys are scored per block of queries, and rows for a group of blocks of at most `GROUP_SCORES` scores. The backward
pass recomputes the scores of a group from the logarithm of each query's total weight. Memory is therefore linear in T,
whereas autograd would keep T * (rows + window) numbers twice.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from linformer_cli.attention.tensors import Context

# The number of scores held at once is small enough for the cache and large enough to hide the overhead of a call.
GROUP_SCORES = 2**20


class Pattern(NamedTuple):
    """Which keys and rows each query sees.

    `first` is the position of the first query, whose key `before` near keys precede, of which `missing` are padding.
    Every `span` positions are compressed to `rank` rows, visible from the next position on. `block` queries, which
    divide all queries, share one slice of near keys.
    """

    first: int
    span: int
    rank: int
    window: int
    before: int
    missing: int
    block: int


class Group(NamedTuple):
    """Queries `start` to `stop`; all of them see the first `low` rows, and the last query sees the first `high` rows.

    `near_hidden` [blocks or 1, block, before + block] and `rows_hidden` [stop - start, high - low] mark hidden keys.
    """

    start: int
    stop: int
    low: int
    high: int
    near_hidden: Tensor
    rows_hidden: Tensor


def iter_groups(pattern: Pattern, q: Tensor, rows: int) -> Iterator[Group]:
    """Return the groups of the queries q [N, T, K]; no query sees more than `rows` rows."""
    batch, length, _ = q.shape
    block, before = pattern.block, pattern.before
    query = torch.arange(block, device=q.device).unsqueeze(-1) + before
    key = torch.arange(before + block, device=q.device)
    out_of_window = ((key > query) | (key <= query - pattern.window)).unsqueeze(0)
    blocks = max(1, GROUP_SCORES // (batch * (rows + before + block) * block))
    for start in range(0, length, blocks * block):
        stop = min(start + blocks * block, length)
        hidden = out_of_window
        if start < pattern.missing:
            begin = torch.arange(start, stop, block, device=q.device)
            hidden = hidden | (begin.view(-1, 1, 1) + key < pattern.missing)
        low, high = (min((pattern.first + place) // pattern.span * pattern.rank, rows) for place in (start, stop - 1))
        position = torch.arange(pattern.first + start, pattern.first + stop, device=q.device)
        seen = (position // pattern.span * pattern.rank).unsqueeze(-1)
        yield Group(start, stop, low, high, hidden, torch.arange(low, high, device=q.device) >= seen)


class _NearAndRows(torch.autograd.Function):
    """Outputs [N, T, V] of q [N, T, K], near_k and near_v [N, before + T, .], and row_k and row_v [N, R, .]."""

    @staticmethod
    def forward(
        ctx: Context[Pattern], q: Tensor, near_k: Tensor, near_v: Tensor, row_k: Tensor, row_v: Tensor, pattern: Pattern
    ) -> Tensor:
        y = near_v.new_empty(*q.shape[:2], near_v.shape[-1])
        log_total = q.new_empty(*q.shape[:2], 1)
        for group in iter_groups(pattern, q, row_k.shape[1]):
            part = slice(group.start, group.stop)
            near = _blocks(q[:, part], pattern.block) @ _near(near_k, pattern, group).transpose(-1, -2)
            _hide(near.view(len(q), -1, *near.shape[1:]), group.near_hidden)
            largest = near.amax(dim=-1, keepdim=True).view(len(q), -1, 1)
            if group.high:
                far = q[:, part] @ row_k[:, : group.high].transpose(-1, -2)
                _hide(far[..., group.low :], group.rows_hidden)
                largest = torch.maximum(largest, far.amax(dim=-1, keepdim=True))
            near.sub_(_blocks(largest, pattern.block)).exp_()
            total = near.sum(dim=-1, keepdim=True).view(len(q), -1, 1)
            sums = (near @ _near(near_v, pattern, group)).view(len(q), -1, y.shape[-1])
            if group.high:
                far.sub_(largest).exp_()
                total += far.sum(dim=-1, keepdim=True)
                sums += far @ row_v[:, : group.high]
            torch.div(sums, total, out=y[:, part])
            torch.add(largest, total.log_(), out=log_total[:, part])
        ctx.save_for_backward(q, near_k, near_v, row_k, row_v, y, log_total)
        ctx.settings = pattern
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Context[Pattern], *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        q, near_k, near_v, row_k, row_v, y, log_total = ctx.saved_tensors
        pattern, grad_y = ctx.settings, grad_outputs[0].contiguous()
        grad_q = torch.empty_like(q)
        grads = [torch.zeros_like(x) for x in (near_k, near_v, row_k, row_v)]
        grad_near_k, grad_near_v, grad_row_k, grad_row_v = grads
        # With weights P and scores S, dS = P * (dP - sum of P dP) and the sum of P dP is y . dy.
        offset = (y * grad_y).sum(dim=-1, keepdim=True).neg_()
        with torch.autocast(q.device.type, enabled=False):
            for group in iter_groups(pattern, q, row_k.shape[1]):
                part = slice(group.start, group.stop)
                parts = q[:, part], grad_y[:, part], log_total[:, part].neg(), offset[:, part]
                queries, outputs, minus_log_total, minus_sum = (_blocks(x, pattern.block) for x in parts)
                keys, values = _near(near_k, pattern, group), _near(near_v, pattern, group)
                weights = _add_product(minus_log_total, queries, keys)
                _hide(weights.view(len(q), -1, *weights.shape[1:]), group.near_hidden)
                weights.exp_()
                _fold(grad_near_v, weights.transpose(-1, -2) @ outputs, pattern, group)
                grad_scores = _add_product(minus_sum, outputs, values).mul_(weights)
                _fold(grad_near_k, grad_scores.transpose(-1, -2) @ queries, pattern, group)
                grad_queries = (grad_scores @ keys).view(len(q), -1, q.shape[-1])
                if group.high:
                    queries, outputs, minus_log_total, minus_sum = parts
                    keys, values = row_k[:, : group.high], row_v[:, : group.high]
                    weights = _add_product(minus_log_total, queries, keys)
                    _hide(weights[..., group.low :], group.rows_hidden)
                    weights.exp_()
                    grad_row_v[:, : group.high] += weights.transpose(-1, -2) @ outputs
                    grad_scores = _add_product(minus_sum, outputs, values).mul_(weights)
                    grad_row_k[:, : group.high] += grad_scores.transpose(-1, -2) @ queries
                    grad_queries += grad_scores @ keys
                grad_q[:, part] = grad_queries
        return grad_q, *grads, None


def _blocks(x: Tensor, block: int) -> Tensor:
    """Return x [N, T, W] as [N T / block, block, W]."""
    return x.reshape(-1, block, x.shape[-1])


def _near(x: Tensor, pattern: Pattern, group: Group) -> Tensor:
    """Return the near keys or values of every block of the group, [N blocks, before + block, W]."""
    part = x[:, group.start : group.stop + pattern.before]
    pieces = part.unfold(1, pattern.before + pattern.block, pattern.block).transpose(-1, -2)
    return pieces.reshape(-1, *pieces.shape[2:])


def _fold(total: Tensor, pieces: Tensor, pattern: Pattern, group: Group) -> None:
    """Add pieces [N blocks, before + block, W] to the places of `total` that `_near` reads; pieces may overlap."""
    size = pattern.before + pattern.block
    part = total[:, group.start : group.stop + pattern.before]
    places = part.unfold(1, size, pattern.block).transpose(-1, -2)
    pieces = pieces.view(len(total), -1, *pieces.shape[1:])
    turns = -(-size // pattern.block)
    for turn in range(min(turns, pieces.shape[1])):
        places[:, turn::turns] += pieces[:, turn::turns]


def _hide(scores: Tensor, hidden: Tensor) -> None:
    scores.masked_fill_(hidden, -math.inf)


def _add_product(offset: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Return offset [N, T, 1] + left [N, T, W] right^T with right [N, S, W], in one call."""
    return torch.baddbmm(offset.expand(-1, -1, right.shape[1]), left, right.transpose(-1, -2))


def attend_near_and_rows(
    q: Tensor, near: tuple[Tensor, Tensor], rows: tuple[Tensor, Tensor], pattern: Pattern
) -> Tensor:
    """Return outputs [B, H, T, V] of scaled queries [B, H, T, K], with T a multiple of `pattern.block`.

    `near` are keys and values [B, H, before + T, .], and `rows` [B, H, R, .]. No query sees more than R rows.
    """
    y = _NearAndRows.apply(q.flatten(0, 1), *(x.flatten(0, 1) for x in (*near, *rows)), pattern)
    return y.unflatten(0, q.shape[:2])
