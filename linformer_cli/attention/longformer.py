"""Longformer attention (Beltagy 2020, arXiv 2004.05150): a sliding window, dilated per head, and global keys."""

from typing import Any

import torch
from pydantic import field_validator
from torch import Tensor

from linformer_cli.config import LARGEST_IMAGE
from linformer_cli.errors import UsageError
from linformer_cli.units import parse_count
from .base import AttentionOptions, AttentionShape, Gates, Memory, Out, setting
from .parts.caches import CacheLayout, FixedCache, KeyValueCache, init_cache
from .parts.spans import FEWEST_QUERIES, Pattern, Span, SpanAttention


class LongformerOptions(AttentionOptions):
    window: int = setting(32, "number of positions in a query's window, including its own", gt=0)
    dilation: int | str | None = setting(
        None,
        "distance between the positions of the window: one number, or a list such as 1,4 that heads "
        "cycle through (default: 1 for even heads, 4 for odd heads)",
    )
    globals: int = setting(1, "number of positions at the start that all later positions see", ge=0, le=65_536)

    @field_validator("dilation")
    @classmethod
    def _dilations_are_whole_numbers(cls, value: int | str | None) -> int | str | None:
        if value is not None and not all(parse_count(part.strip()) for part in str(value).split(",")):
            raise ValueError("must be a number of 1 or more, or a comma-separated list of such numbers for the heads")
        return value

    def dilations(self, heads: int) -> tuple[int, ...]:
        """Return each head's dilation; raises `UsageError` if the list's length does not divide the number of heads."""
        if self.dilation is None:
            listed = [1, 4][:heads]
            return tuple(listed[head % len(listed)] for head in range(heads))
        listed = [int(part) for part in str(self.dilation).split(",")]
        if heads % len(listed):
            hint = "list one for each head, or a number of values that divides the number of heads"
            raise UsageError(f"dilation '{self.dilation}' lists {len(listed)} values for {heads} heads; {hint}")
        return tuple(listed) * (heads // len(listed))


class LongformerAttention(SpanAttention[LongformerOptions]):
    """y_t = sum over j in S(t) of softmax_j(q_t . k_j / sqrt(K)) v_j.

    S(t) holds t, t - d, ..., t - (window - 1) d and every j < globals. d is the dilation of the head, or the number of
    positions in an image if that is smaller. Positions outside 0 .. t are left out, and each position counts once. This
    is the causal half of section 3.1 of the source, with two differences. Global positions have no projections of their
    own. Only keys are global: a causal query at a global position sees only earlier positions.

    The state is a cache of globals + ring positions, with ring = (window - 1) max(d) + 1. Its first `globals` rows hold
    the first positions. The other rows are a ring buffer: position j is in row globals + j mod ring.

    In the bidirectional form, S(t) also holds t + d, ..., t + (window - 1) d, and a query at a global position sees all
    positions, as in the source.
    """

    name = "longformer"
    source = "Beltagy 2020, arXiv 2004.05150"
    family = "local-global"
    method = "sliding window, dilated per head, and global keys"
    memory = Memory.BOUNDED
    bidirectional = True

    def __init__(self, options: LongformerOptions, shape: AttentionShape) -> None:
        dilations = options.dilations(shape.heads)
        reach = (options.window - 1) * max(dilations)
        if reach >= LARGEST_IMAGE:
            window = f"a window of {options.window:,} with dilation {max(dilations):,}"
            most = f"an image has at most {LARGEST_IMAGE:,} values"
            raise UsageError(f"{window} reaches {reach:,} positions back; {most}")
        super().__init__(options, shape, max(options.window - 1, FEWEST_QUERIES))
        # A window of one position needs no dilation. No dilation needs to exceed the number of positions in an image.
        self.dilations = tuple(min(dilation, shape.positions) if options.window > 1 else 1 for dilation in dilations)
        self.ring = (options.window - 1) * max(self.dilations) + 1
        self.sees_all = options.globals

    def list_patterns(self, position: Tensor, length: int | None = None) -> list[Pattern]:
        count, reach = self.options.globals, self.options.window - 1
        patterns = []
        for d in sorted({*self.dilations}):
            heads = torch.tensor([head for head, dilation in enumerate(self.dilations) if dilation == d])
            spans = [Span(0, 1, count), Span(position - reach * d, d, 2 * reach + 1, low=count)]
            patterns.append(Pattern(heads if len(heads) < self.shape.heads else slice(None), [(d, spans)]))
        return patterns

    @property
    def layout(self) -> CacheLayout:
        return CacheLayout(self.options.globals + self.ring, self.options.globals, self.ring)

    def locate(self, position: Tensor) -> Tensor:
        return self.layout.locate(position)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, state: KeyValueCache | None, gates: Gates) -> Out[KeyValueCache]:
        if state is None:
            state = self.init_state(len(q), 0, q.device, k.dtype)
        count, start, stop = self.options.globals, int(state.position), int(state.position) + q.shape[2]
        keys, values = (self._unroll(*x, start) for x in ((state.keys, k), (state.values, v)))

        def locate(position: Tensor) -> Tensor:
            return torch.where(position < count, position, position - start + count + self.ring)

        y = self.attend_spans(q, keys, values, start, locate)
        # The last positions, each in its row of the ring.
        keys, values = (torch.cat([x[:, :, :count], x[:, :, -self.ring :].roll(stop, 2)], 2) for x in (keys, values))
        return y, KeyValueCache(keys, values, state.position + q.shape[2])

    def _unroll(self, rows: Tensor, new: Tensor, start: int) -> Tensor:
        """Return the global rows of a state at `start`, the `ring` last ones in order of position, and `new` ones."""
        count, length, new = self.options.globals, new.shape[2], new.to(rows.dtype)
        known, old = rows.split([count, self.ring], dim=2)
        if start < count:
            known = torch.cat([known[:, :, :start], new[:, :, : count - start], known[:, :, start + length :]], dim=2)
        return torch.cat([known, old.roll(-start, dims=2), new], dim=2)

    def init_state(self, batch: int, capacity: int, device: torch.device, dtype: torch.dtype) -> KeyValueCache:
        return init_cache(batch, self.shape, self.layout.capacity, device, dtype)

    def _step(self, q_t: Tensor, k_t: Tensor, v_t: Tensor, state: Any, gates_t: Gates) -> tuple[Tensor, Any]:
        if isinstance(state, FixedCache):
            state.write(self.locate(state.place), k_t, v_t)
            return self.step_fixed(q_t, state), state
        position = int(state.position)
        row = int(self.locate(torch.tensor(position)))
        state.keys[:, :, row], state.values[:, :, row] = k_t, v_t
        state.position.add_(1)
        return self.step_cache(q_t, state, position), state

    def list_states(self, state: KeyValueCache) -> list[Tensor]:
        return [state.keys, state.values]
