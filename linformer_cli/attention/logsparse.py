"""LogSparse attention (Li 2019, arXiv 1907.00235): a query sees positions at distances 0, 1, 2, 4, 8 and so on."""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from .base import AttentionOptions, setting
from .parts.caches import KeyValueCache
from .parts.spans import Pattern, Span, SpanAttention
from .tensors import Context, accumulator_dtype, constant

SCORES_AT_ONCE = 2**18  # per head and image in the parallel form, except for one grid row of queries


class LogsparseOptions(AttentionOptions):
    window: int = setting(1, "number of nearest positions that a query sees, itself included", gt=0, le=4_096)
    restart: int | None = setting(None, "repeat the pattern at every multiple of this distance (default: never)", gt=0)


class _Grid(NamedTuple):
    """Queries from position `start` on, as `rows` rows of `columns` <= `period` positions, after `before` rows of keys.

    The query at position t sees position t - offset - n period for each of `offsets` and n = 0, 1, 2 and so on.
    """

    offsets: tuple[int, ...]
    period: int
    start: int
    rows: int
    columns: int
    before: int

    @property
    def front(self) -> int:
        """The number of zeros to add before the first key, so that no row starts before the tensor."""
        return max(self.before * self.period + self.offsets[-1] - self.start, 0)

    def pad(self, x: Tensor) -> Tensor:
        """Return keys or values x [N, positions, W] with zeros before position 0 and after the last row."""
        end = self.start + (self.rows - 1) * self.period + self.columns
        return functional.pad(x, (0, 0, self.front, end - x.shape[1]))

    def shift(self, x: Tensor, offset: int, rows: int) -> Tensor:
        """Return a view [N, columns, rows, W] of padded x: in each row, the position `offset` before each column."""
        first = self.start - self.before * self.period - offset + self.front
        part = x[:, first : first + (rows - 1) * self.period + self.columns]
        return part.unfold(1, self.columns, self.period).permute(0, 3, 1, 2)

    def hide(self, first: int, stop: int, device: torch.device) -> Tensor:
        """True for keys after the query or before position 0, [columns, rows of queries, offsets, rows of keys]."""
        row, key_row = (torch.arange(*ends, device=device) for ends in ((first, stop), (0, stop + self.before)))
        column, offset = torch.arange(self.columns, device=device), constant(self.offsets, device, torch.int64)
        position = self.start + (key_row - self.before) * self.period + column.view(-1, 1, 1, 1) - offset.view(-1, 1)
        return (position < 0) | (key_row > (row + self.before).view(-1, 1, 1))


class LogsparseAttention(SpanAttention[LogsparseOptions]):
    """y_t = sum over j in S(t) of softmax_j(q_t . k_j / sqrt(K)) v_j, where S(t) holds O(log t) positions j <= t.

    S(t) holds the `window` nearest positions, of which t is one, and the positions at distances window - 1 + 2^i for i
    = 0, 1, 2 and so on. With a window of 1, the distances are 0, 1, 2, 4, 8 and so on. With `restart`, only the
    distances below `restart` are used, and S(t) also holds every position that is a multiple of `restart` before one of
    these.

    This is section 4.2 of the source with its two variants, local attention and restart attention. The source computes
    queries and keys by causal convolutions; the layer's `short_convolution` does this. In the source's code, which uses
    a dense mask, early positions see all positions before them; here they see only S(t).
    """

    name = "logsparse"
    source = "Li 2019, arXiv 1907.00235"
    family = "sparse"
    method = "positions at distances that are powers of two"

    def _offsets(self, length: int) -> tuple[int, ...]:
        """Return the distances below `restart` and `length`, in ascending order."""
        window, limit = self.options.window, min(self.options.restart or length, length)
        powers = (window - 1 + (1 << i) for i in range(limit.bit_length()))
        return (*range(min(window, limit)), *(distance for distance in powers if distance < limit))

    def attend_cache(self, q: Tensor, cache: KeyValueCache) -> Tensor:
        length, new = int(cache.position), q.shape[2]
        period, start = self.options.restart or length, length - new
        columns, rows = min(period, new), -(-new // period)
        grid = _Grid(self._offsets(length), period, start, rows, columns, (start + columns - 1) // period)
        dtype = accumulator_dtype(q.dtype)
        queries = functional.pad(q.to(dtype) / math.sqrt(q.shape[-1]), (0, 0, 0, rows * columns - new))
        keys, values = (grid.pad(part[:, :, :length].to(dtype).flatten(0, 1)) for part in (cache.keys, cache.values))
        y = _AttendGrid.apply(queries.flatten(0, 1).unflatten(1, (rows, columns)), keys, values, grid)
        return y.flatten(1, 2)[:, :new].unflatten(0, q.shape[:2])

    def list_patterns(self, position: Tensor, length: int | None = None) -> list[Pattern]:
        window, period, offsets = self.options.window, self.options.restart, self._offsets(int(position[-1]) + 1)
        left = [position - offset for offset in offsets]
        if period is not None:
            return [Pattern(slice(None), [(period, [Span(x % period, period, x // period + 1) for x in left])])]
        near = Span(position - window + 1, 1, window)
        return [Pattern(slice(None), [(1, [near, *(Span(x, 1, 1) for x in left[window:])])])]


class _AttendGrid(torch.autograd.Function):
    """Outputs [N, rows, columns, V] of scaled queries [N, rows, columns, K] for padded keys and values.

    For each offset, all rows of a column form one product of queries and shifted keys. Training memory is linear in T:
    the backward pass recomputes the scores of a group of rows from the logarithm of each query's total weight.
    """

    @staticmethod
    def forward(ctx: Context[_Grid], q: Tensor, k: Tensor, v: Tensor, grid: _Grid) -> Tensor:
        y, log_total = v.new_empty(*q.shape[:3], v.shape[-1]), q.new_empty(*q.shape[:3], 1)
        for first, stop in _groups(grid):
            scores = _score(q[:, first:stop].transpose(1, 2), k, grid, first, stop)
            totals = scores.flatten(-2).logsumexp(dim=-1, keepdim=True)
            scores.sub_(totals.unsqueeze(-1)).exp_()
            log_total[:, first:stop] = totals.transpose(1, 2)
            seen = stop + grid.before
            sums = _weigh(scores[..., 0, :], grid.shift(v, grid.offsets[0], seen))
            for index, offset in enumerate(grid.offsets[1:], 1):
                sums += _weigh(scores[..., index, :], grid.shift(v, offset, seen))
            y[:, first:stop] = sums.transpose(1, 2)
        ctx.save_for_backward(q, k, v, y, log_total)
        ctx.settings = grid
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Context[_Grid], grad_y: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, y, log_total = ctx.saved_tensors
        grid = ctx.settings
        grad_q, grad_k, grad_v = (torch.zeros_like(x) for x in (q, k, v))
        # With weights P and scores S, dS = P * (dP - sum of P dP) and the sum of P dP is y . dy.
        own = (y * grad_y).sum(dim=-1, keepdim=True)
        with torch.autocast(q.device.type, enabled=False):
            for first, stop in _groups(grid):
                queries, outputs, totals, sums = (x[:, first:stop].transpose(1, 2) for x in (q, grad_y, log_total, own))
                grad_queries, seen = grad_q[:, first:stop].transpose(1, 2), stop + grid.before
                weights = _score(queries, k, grid, first, stop).sub_(totals.unsqueeze(-1)).exp_()
                for index, offset in enumerate(grid.offsets):
                    weight = weights[..., index, :]
                    grid.shift(grad_v, offset, seen).add_(_weigh(weight.transpose(-1, -2), outputs))
                    scores = _dot(outputs, grid.shift(v, offset, seen)).sub_(sums).mul_(weight)
                    grid.shift(grad_k, offset, seen).add_(_weigh(scores.transpose(-1, -2), queries))
                    grad_queries += _weigh(scores, grid.shift(k, offset, seen))
        return grad_q, grad_k, grad_v, None


def _groups(grid: _Grid) -> list[tuple[int, int]]:
    """For each group of queries, its first row and the row after its last one."""
    rows = max(1, SCORES_AT_ONCE // (grid.columns * len(grid.offsets) * (grid.rows + grid.before)))
    return [(first, min(first + rows, grid.rows)) for first in range(0, grid.rows, rows)]


def _dot(x: Tensor, y: Tensor) -> Tensor:
    """Return the products [N, columns, a, b] of vectors x [N, columns, a, W] and y [N, columns, b, W]."""
    # Without `restart`, a and b are 1, and products of such small matrices are slow.
    return (x * y).sum(dim=-1, keepdim=True) if x.shape[2] == y.shape[2] == 1 else x @ y.transpose(-1, -2)


def _weigh(weights: Tensor, x: Tensor) -> Tensor:
    """Return the sums [N, columns, a, W] of vectors x [N, columns, b, W] with weights [N, columns, a, b]."""
    return weights * x if weights.shape[2:] == (1, 1) else weights @ x


def _score(queries: Tensor, k: Tensor, grid: _Grid, first: int, stop: int) -> Tensor:
    """Return scores [N, columns, rows of queries, offsets, rows of keys] of queries [N, columns, rows, K]."""
    seen = stop + grid.before
    scores = queries.new_empty(*queries.shape[:3], len(grid.offsets), seen)
    for index, offset in enumerate(grid.offsets):
        scores[..., index, :] = _dot(queries, grid.shift(k, offset, seen))
    return scores.masked_fill_(grid.hide(first, stop, k.device), -math.inf)
