"""Softmax attention to a pattern of positions that is stated once, as spans, for all forms of a mechanism.

The parallel forms turn them into lists of keys, `step` gathers rows of the cache, and the engine gets a table.
"""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._pytree import tree_map_only

from linformer_cli.attention.base import AttentionShape, Gates, MixInputs, Options
from linformer_cli.attention.tensors import accumulator_dtype, find_padding, real_tensors
from .caches import CachedAttention, CacheLayout, FixedCache, KeyValueCache, attend_masked, emit_rows, place_spans
from .key_sets import Lists, attend_lists

MANY = 2**40  # a number of positions that reaches beyond every sequence
FEWEST_QUERIES = 16  # with fewer queries per list of keys, the overhead costs more than is saved in products
_MOST_KEPT = 3  # results that `_Kept` keeps; training and validation need one

# Some heads, as an index. A list would be copied to the device at every use.
Heads = slice | Tensor


class Span(NamedTuple):
    """The positions first, first + step and so on, `number` in all, without those before `low`; tensors are [H, T]."""

    first: Tensor | int
    step: int
    number: Tensor | int
    low: int = 0


class Pattern(NamedTuple):
    """The positions that some heads see: disjoint spans, cut off at the query itself, or at the end of a sequence.

    Queries that are as far apart as the first number of one of the `sets` share its keys.
    """

    heads: Heads
    sets: list[tuple[int, list[Span]]]


def stack_spans(spans: list[Span], stop: Tensor) -> Tensor:
    """Stack spans, int64 [H or 1, T, spans, 3]: first, step and count of positions from `low` to below `stop` [T]."""
    numbers = []
    for first, step, number, low in spans:
        skipped = torch.as_tensor((low - first + step - 1) // step).clamp(min=0)
        first = first + skipped * step
        count = torch.minimum(number - skipped, (stop - first + step - 1) // step).clamp(min=0)
        numbers += [first, torch.tensor(step), count]
    table = torch.stack(torch.broadcast_tensors(*numbers), dim=-1).unflatten(-1, (-1, 3))
    return table if table.dim() == 4 else table.unsqueeze(0)


def share_keys(table: Tensor, apart: int, block: int, start: int = 0) -> Lists:
    """Return lists of keys for up to `block` of T queries from `start` on, `apart` from each other, by their spans."""
    length = table.shape[1]
    apart = min(apart, length)
    # Blocks of neighbours start at multiples of their length, like those of a pattern.
    front = start % block if apart == 1 else 0
    block = min(block, -(-(front + length) // apart))
    groups = -(-(front + length) // (block * apart))
    queries = torch.arange(groups * block * apart).view(groups, block, apart).transpose(1, 2).flatten(0, 1) - front
    # Padding sees what the nearest query of its list sees, because every query must see a key.
    nearest = queries - (queries - length + apart).clamp(min=0) // apart * apart
    first, step, count = table[:, nearest.clamp(min=0)].unbind(-1)
    step = step[:, :, :1]
    lowest = first.masked_fill(count == 0, MANY).amin(dim=2, keepdim=True)
    begin = ((first - lowest) // step).masked_fill(count == 0, 0)
    end = begin + count
    if bool((begin == begin[:1]).all() & (end == end[:1]).all()):
        begin, end = begin[:1], end[:1]
    keys, hidden = [], []
    for n, size in enumerate(end.amax(dim=(0, 1, 2)).tolist()):
        index = torch.arange(size)
        keys.append(lowest[..., n] + step[..., n] * index)
        hidden.append((index < begin[..., n, None]) | (index >= end[..., n, None]))
    return Lists(queries, torch.cat(keys, dim=-1), torch.cat(hidden, dim=-1))


class _Kept:
    """A few results of a computation on the CPU, and their copies on devices, which are made only once."""

    def __init__(self) -> None:
        self._results: dict[Any, dict[torch.device, Any]] = {}

    def find(self, key: Any, compute: Callable[[], Any], device: torch.device) -> Any:
        """Return the result of `compute`, which depends only on `key`, on `device`."""
        if key not in self._results:
            if len(self._results) == _MOST_KEPT:
                # The first result stays, because recorded training steps may read it.
                del self._results[list(self._results)[1]]
            with real_tensors():
                self._results[key] = {torch.device("cpu"): compute()}
        copies = self._results[key]
        if device not in copies:
            copies[device] = tree_map_only(Tensor, lambda x: x.to(device), copies[torch.device("cpu")])
        return copies[device]


class SpanAttention(CachedAttention[Options]):
    """y_t = sum over j in S(t) of softmax_j(q_t . k_j / sqrt(K)) v_j, where S(t) is a pattern of positions."""

    # The number of positions at the start that see all positions in the bidirectional form.
    sees_all = 0

    def __init__(self, options: Options, shape: AttentionShape, shared: int = FEWEST_QUERIES) -> None:
        """In the parallel forms, up to `shared` queries share a list of keys."""
        super().__init__(options, shape)
        self._shared = shared
        self._lists, self._rows = _Kept(), _Kept()

    @abstractmethod
    def list_patterns(self, position: Tensor, length: int | None = None) -> list[Pattern]:
        """List what queries at `position` int64 [T] see. `length` is T in the bidirectional form, otherwise None."""

    def locate(self, position: Tensor) -> Tensor:
        """Return the rows of the cache that hold these positions."""
        return position

    @property
    def layout(self) -> CacheLayout:
        """Where each position is in the cache of a whole image."""
        return CacheLayout(self.shape.positions, 0, self.shape.positions)

    def attend_cache(self, q: Tensor, cache: KeyValueCache) -> Tensor:
        end = int(cache.position)
        return self.attend_spans(q, cache.keys[:, :, :end], cache.values[:, :, :end], end - q.shape[2])

    def attend_spans(
        self, q: Tensor, k: Tensor, v: Tensor, start: int, locate: Callable[[Tensor], Tensor] = lambda x: x
    ) -> Tensor:
        """Return outputs [B, H, T, V] of queries from position `start`; position p is in row locate(p) of k and v."""
        if q.device.type == "cpu":
            # On a CPU, products of small blocks are slower and less accurate in bfloat16 than in float32.
            k, v = k.to(accumulator_dtype(k.dtype)), v.to(accumulator_dtype(v.dtype))
        y = v.new_empty(*q.shape[:3], v.shape[3])
        # Each training step has the same lists.
        key, length = (start, q.shape[2]), q.shape[2]
        for heads, lists in self._lists.find(key, lambda: self._share_lists(start, length, locate), q.device):
            y[:, heads] = attend_lists(q[:, heads].to(k.dtype), k[:, heads], v[:, heads], lists)
        return y

    def _share_lists(self, start: int, length: int, row: Callable[[Tensor], Tensor]) -> list[tuple[Heads, list[Lists]]]:
        """Return the heads of each pattern, and their lists of rows."""
        position = torch.arange(start, start + length)
        return [
            (heads, [x._replace(keys=row(x.keys)) for x in self._list_keys(sets, position + 1, start)])
            for heads, sets in self.list_patterns(position)
        ]

    def _attend_all(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None, gates: Gates) -> Tensor:
        q, k, v = (x.to(accumulator_dtype(x.dtype)) for x in (q, k, v))
        length, y = q.shape[2], torch.empty_like(v)
        position = torch.arange(length)
        for heads, sets in self.list_patterns(position, length):
            lists = self._list_keys(sets, torch.full_like(position, length))
            lists = [Lists(*(x.to(q.device) for x in each)) for each in lists]
            y[:, heads] = attend_lists(q[:, heads], k[:, heads], v[:, heads], lists, lengths)
        if self.sees_all:
            seen = None if lengths is None else ~find_padding(lengths, length)[:, None, None]
            y[:, :, : self.sees_all] = attend_masked(q[:, :, : self.sees_all], k, v, seen)
        return y

    def _list_keys(self, sets: list[tuple[int, list[Span]]], stop: Tensor, start: int = 0) -> list[Lists]:
        """Return the lists of keys of each set of spans that has any."""
        lists = []
        for apart in sorted({apart for apart, _ in sets}):
            spans = [span for other, spans in sets for span in spans if other == apart]
            lists.append(share_keys(stack_spans(spans, stop), apart, self._shared, start))
        return [each for each in lists if each.keys.shape[2]]

    def _list_tables(self, position: Tensor) -> list[tuple[Heads, Tensor]]:
        """Return the heads and the table of each pattern, for queries at `position`; see `stack_spans`."""
        return [
            (heads, stack_spans([span for _, spans in sets for span in spans], position + 1))
            for heads, sets in self.list_patterns(position)
        ]

    def step_cache(self, q_t: Tensor, cache: KeyValueCache, position: int) -> Tensor:
        number, place = divmod(position, self.shape.positions)
        lists = self._find_rows(number, q_t.device)
        return self._step_rows(q_t, cache, [(heads, rows[:, place, : used[place]]) for heads, rows, used in lists])

    def step_fixed(self, q_t: Tensor, cache: FixedCache) -> Tensor:
        lists = self._find_rows(0, q_t.device)
        place = cache.place.unsqueeze(0)
        return self._step_rows(q_t, cache, [(heads, table.index_select(1, place)[:, 0]) for heads, table, _ in lists])

    def _step_rows(self, q_t: Tensor, cache: KeyValueCache | FixedCache, lists: list[tuple[Heads, Tensor]]) -> Tensor:
        """Return the output [B, H, V] for rows int64 [H or 1, S] that some heads see. Negative numbers are no rows."""
        q_t = q_t.to(cache.keys.dtype).unsqueeze(2)
        y_t = q_t.new_empty(*q_t.shape[:3], cache.values.shape[3])
        for heads, rows in lists:
            first = torch.arange(self.shape.heads, device=q_t.device)[heads].unsqueeze(1) * cache.keys.shape[2]
            at = rows.clamp(min=0) + first
            keys, values = (x.flatten(1, 2).index_select(1, at.flatten()).unflatten(1, at.shape) for x in cache[:2])
            seen = (rows >= 0).unsqueeze(1) if isinstance(cache, FixedCache) else None
            y_t[:, heads] = functional.scaled_dot_product_attention(q_t[:, heads], keys, values, attn_mask=seen)
        return y_t.squeeze(2)

    def fix_state(self, state: KeyValueCache, place: Tensor, room: Tensor, dtype: torch.dtype) -> FixedCache:
        return FixedCache(*state[:2], place)

    def _find_rows(self, number: int, device: torch.device) -> list[tuple[Heads, Tensor, list[int]]]:
        return cast(Any, self._rows.find(number, lambda: self._list_rows(number), device))

    def _list_rows(self, number: int) -> list[tuple[Heads, Tensor, list[int]]]:
        """For each pattern: heads, rows int64 [H or 1, T, S] of image `number` (else -1), and how many t uses."""
        found = []
        for heads, table in self._list_tables(torch.arange(self.shape.positions) + number * self.shape.positions):
            first, step, count = table.unbind(-1)
            ends = count.cumsum(dim=-1)
            index = torch.arange(int(ends.amax())).expand(*ends.shape[:2], -1).contiguous()
            span = torch.searchsorted(ends, index, right=True).clamp(max=ends.shape[-1] - 1)
            inside = index - (ends - count).gather(-1, span)
            rows = self.locate(first.gather(-1, span) + step.gather(-1, span) * inside)
            found.append((heads, rows.masked_fill(index >= ends[..., -1:], -1), ends[0, :, -1].tolist()))
        return found

    def emit(self, inputs: MixInputs) -> None:
        tables = self._list_tables(torch.arange(self.shape.positions))
        heads = self.shape.heads if len(tables) > 1 else len(tables[0][1])
        spans = torch.zeros(heads, self.shape.positions, max(x.shape[2] for _, x in tables), 3, dtype=torch.int64)
        for heads_of, table in tables:
            spans[heads_of, :, : table.shape[2]] = table
        emit_rows(inputs, self.layout, place_spans(spans, self.layout))
