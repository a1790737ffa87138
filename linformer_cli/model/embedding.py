"""The input of a block: its coordinates in the image and the known values around it.

The tokens are a start token followed by the values of an image in raster order, with channels innermost. Token 0 is the
start token. For i > 0, token i holds value i - 1. At token i the model predicts value i, so a position may read values
0 .. i - 1. Blocks that step over pixels have one input for each pixel, at the token of its first value. In a model with
classes, the start token is the image's class, which every position reads. If the class is optional, the number of
classes is the start token of an image without a class.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from linformer_cli.attention.tensors import host_number
from linformer_cli.config import ImageShape, ModelConfig
from linformer_cli.native.constants import LEFT_PLACE, UP_PLACE
from linformer_cli.native.program import NO_BUFFER, Builder
from .neighbours import TABLE_PIXELS, Differences, NeighbourTables, Surroundings, list_surroundings

_LAST_VALUES = {"previous": 1, "recent": 4}  # the number of values that `previous` and `recent` read
# (rows up, columns to the left) of two pixels, and of those that `neighbours` reads, besides the pixel itself.
LEFT, UP = (0, 1), (1, 0)
_NEIGHBOURS = (LEFT, (0, 2), (1, 1), UP, (1, -1), (2, 0))


class EmbeddingState(NamedTuple):
    """The last values, the number of tokens seen, and the class of each image.

    `recent` is int16 [B, reach] with the newest value last. `position` is a 0-d int64 tensor. `label` is int64 [B, 1],
    or [B, 0] in a model without classes. For a CUDA graph, `place` is the number of tokens, on the device. `position`
    then only tells which value of a pixel comes next, and is 0 only at the start.
    """

    recent: Tensor
    position: Tensor
    label: Tensor
    place: Tensor | None = None

    @property
    def tokens(self) -> int | Tensor:
        return int(self.position) if self.place is None else self.place


def count_from(first: int | Tensor, count: int, device: torch.device, end: int | None = None) -> Tensor:
    """Return positions int64 [count]. On a device, look-ahead repeats the last one if it goes beyond the `end`."""
    places = torch.arange(count, device=device) + first
    return places if end is None or count == 1 or isinstance(first, int) else places.clamp(max=end - 1)


def take_rows(table: Tensor, first: int | Tensor, count: int) -> Tensor:
    if isinstance(first, int):
        return table[first : first + count]
    return table.index_select(0, count_from(first, count, table.device, len(table)))


def first_value(position: Any, reach: int) -> Any:
    """Return the number of the value in column 0 of `recent` after `position` tokens; the first token is no value."""
    return position - reach - 1


def ring_slots(sources: Tensor, length: int) -> Tensor:
    """Return the slots of values number `sources` in a ring of `length`: v is in slot v mod length; -1 stays -1."""
    return torch.where(sources < 0, -1, sources % length)


def fill_ring(state: EmbeddingState, length: int) -> Tensor:
    """Return the recent values of `state` as a ring int16 [B, length], `length` at least `reach`; see `ring_slots`."""
    reach = state.recent.shape[1]
    ring = state.recent.new_zeros(len(state.recent), length)
    values = torch.arange(reach, device=ring.device) + first_value(int(state.position), reach)
    ring[:, values % length] = state.recent
    return ring


def context_sources(context: str, image: ImageShape) -> Tensor:
    """Return the numbers int64 [T, slots] of the known values that each position looks up in tables; -1 means no value.

    `residual` has no slots, `previous` has one, the previous value, and `recent` has one for each of the last four
    values. The other contexts have one slot for each channel of six pixels (left, two left, above left, above, above
    right, two above) and for the earlier channels of the pixel itself. Pixels outside the image are missing. Every
    number is smaller than its position.
    """
    if context in _LAST_VALUES:
        # This tensor is on the CPU even for a model on the meta device, because `reach` is computed from it.
        return find_last_values(torch.arange(image.positions, device="cpu"), _LAST_VALUES[context])
    if context == "residual":
        return torch.empty(image.positions, 0, dtype=torch.int64, device="cpu")
    return find_pixels(image, _NEIGHBOURS)


def find_last_values(positions: Tensor, count: int) -> Tensor:
    """Find the numbers int64 [T, count] of the last values before each of `positions` int64 [T]; -1 means none."""
    return (positions.unsqueeze(1) - torch.arange(1, count + 1, device=positions.device)).clamp(min=-1)


def find_pixels(image: ImageShape, offsets: Sequence[tuple[int, int]]) -> Tensor:
    """Find values int64 [T, slots] (-1: none): a pixel's earlier channels, then those at `offsets` (up, left)."""
    positions = torch.arange(image.positions, device="cpu")
    channel = positions % image.channels
    own = [torch.where(channel > other, positions - channel + other, -1) for other in range(image.channels - 1)]
    slots = []
    for same in find_same_channel(image, offsets).unbind(dim=1):
        slots += [torch.where(same < 0, -1, same - channel + other) for other in range(image.channels)]
    return torch.stack([*own, *slots], dim=1)


def find_same_channel(image: ImageShape, offsets: Sequence[tuple[int, int]]) -> Tensor:
    """Find the numbers int64 [T, offsets] of values at `offsets` in the position's own channel; -1 means no value."""
    positions = torch.arange(image.positions, device="cpu")
    row, column = positions // image.values_per_row, positions // image.channels % image.width
    slots = []
    for up, left in offsets:
        inside = (row >= up) & (column >= left) & (column < image.width + left)
        slots.append(torch.where(inside, positions - up * image.values_per_row - left * image.channels, -1))
    return torch.stack(slots, dim=1)


def read_values(tokens: Tensor, state: EmbeddingState, sources: Tensor, missing: int) -> Tensor:
    """Read values int64 [B, n, slots] at `sources` [n, slots], of `tokens` or before them; -1 becomes `missing`."""
    known = torch.cat([state.recent, tokens.to(torch.int16)], dim=1)
    columns = (sources - first_value(state.tokens, state.recent.shape[1])).clamp(min=0)
    values = known[:, columns.flatten()].unflatten(1, sources.shape).long()
    return torch.where(sources < 0, missing, values)


def sum_tables(values: Tensor, tables: Tensor, levels: int) -> Tensor:
    """Sum vectors, to [B, n, W], of values int64 [B, n, slots], one each from `tables` [slots (levels + 1), W]."""
    rows = values + torch.arange(values.shape[-1], device=values.device) * (levels + 1)
    return functional.embedding_bag(rows.flatten(0, 1), tables, mode="sum").unflatten(0, rows.shape[:2])


class PixelEmbedding(nn.Module):
    """Maps tokens int64 [B, T] to vectors [B, T, width], continuing from a state of bounded size.

    If the blocks step over pixels, there is one vector [B, pixels, width] for each pixel whose first value is predicted
    at one of the tokens.

    The state holds the last `reach` values: about two image rows for `neighbours`, and three for `wide`, `hashed` and
    `residual`. A slot without a value has its own embedding, which is also used for the start token. In a model with
    classes, the vector of the class is added at every position. `wide` and `residual` add the output of `Surroundings`,
    and `hashed` adds the outputs of `Surroundings` and `NeighbourTables`.

    If the vectors depend only on the last values, and not on positions, there may be more than T tokens. `last_values`
    is then the number of these values, and otherwise 0.
    """

    sources: Tensor
    values: nn.Parameter | None
    sinusoids: Tensor | None

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        image, grid = config.image, config.block_image
        self.levels = image.levels
        # The number of values from one input of the blocks to the next.
        self.stride = image.positions // grid.positions
        seen = [context_sources(config.context, image)]
        if config.context in ("wide", "hashed", "residual"):
            seen.append(find_pixels(image, list_surroundings()))
        if config.context == "hashed":
            seen.append(find_same_channel(image, TABLE_PIXELS))
        if self.stride > 1:
            # At the first value of a pixel, the slots of the pixel's own channels are empty.
            seen = [part[:: self.stride, image.channels - 1 :] for part in seen]
        self.slots = seen[0].shape[1]
        self.surroundings: Surroundings | None = None
        if len(seen) > 1:
            differences = None
            if config.context == "residual":
                differences = Differences(image.levels, image.channels, 0, LEFT_PLACE, UP_PLACE)
            self.surroundings = Surroundings(seen[1].shape[1], config.width, image, differences)
        sources = torch.cat(seen, dim=1)
        self.register_buffer("sources", sources, persistent=False)
        # The columns of `sources` where the surroundings and the neighbour tables start.
        self.bounds = (self.slots, sum(part.shape[1] for part in seen[:2]))
        distances = torch.arange(0, image.positions, self.stride, device="cpu").unsqueeze(1) - sources
        self.last_values = _LAST_VALUES.get(config.context, 0) if config.embedding == "none" else 0
        self.reach = self.last_values or max(self.stride - 1, int(distances.masked_fill(sources < 0, 1).max()))
        paper = config.embedding == "paper"
        self.value_width = config.width // 2 if paper else config.width
        # All slots share one table, so that one call looks up and adds all vectors.
        self.register_parameter("values", None)
        if self.slots:
            self.values = nn.Parameter(torch.empty(self.slots * (image.levels + 1), self.value_width))
            nn.init.normal_(self.values, std=self.slots**-0.5)
        if paper:
            self.register_buffer("sinusoids", sinusoidal_table(grid.positions, config.width // 2), persistent=False)
        else:
            self.register_parameter("sinusoids", None)
        self.has_grid = config.embedding == "grid"
        if self.has_grid:
            self.row = nn.Embedding(image.height, config.width)
            self.column = nn.Embedding(image.width, config.width)
            self.channel = nn.Embedding(grid.channels, config.width)
            for table in (self.row, self.column, self.channel):
                nn.init.normal_(table.weight, std=0.5)
        self.tables = NeighbourTables(config.width, image.channels) if config.context == "hashed" else None
        self.classes = nn.Embedding(config.label_count, config.width) if config.classes else None
        self.default_label = config.default_label
        if self.classes is not None:
            nn.init.normal_(self.classes.weight, std=0.5)
        self.grid = grid

    def init_state(self, batch: int, device: torch.device) -> EmbeddingState:
        recent = torch.zeros(batch, self.reach, dtype=torch.int16, device=device)
        label = torch.zeros(batch, 0 if self.classes is None else 1, dtype=torch.int64, device=device)
        return EmbeddingState(recent, host_number(), label)

    def forward(self, tokens: Tensor, state: EmbeddingState) -> tuple[Tensor, EmbeddingState]:
        """Return the vectors for tokens int64 [B, T] that follow the tokens in `state`, and the state after them."""
        batch, position = len(tokens), int(state.position)
        start, end = (-(-n // self.stride) for n in (position, position + tokens.shape[1]))
        count, first = end - start, -(-state.tokens // self.stride)
        values = read_values(tokens, state, self._find_sources(first, count), self.levels)
        values, around, together = values.tensor_split(self.bounds, dim=-1)
        if self.values is None:
            assert self.surroundings is not None
            x = self.surroundings.input.weight.new_zeros(*values.shape[:2], self.value_width)
        else:
            x = sum_tables(values, self.values, self.levels)
        if self.sinusoids is not None:
            x = torch.cat([x, take_rows(self.sinusoids, first, count).to(x.dtype).expand(batch, -1, -1)], dim=-1)
        elif self.has_grid:
            x = x + self._grid(first, count)
        if self.surroundings is not None:
            x = x + self.surroundings(around)
        if self.tables is not None:
            x = x + self.tables(together, count_from(first, count, tokens.device) % self.grid.channels)
        # Copies, because views would keep all tokens in memory as long as the state lives, or share the caller's.
        recent = torch.cat([state.recent, tokens.to(torch.int16)], dim=1)[:, tokens.shape[1] :].clone()
        label = state.label
        if self.classes is not None:
            label = label if position else tokens[:, :1].clone()
            x = x + self.classes(label)
        seen = None if state.place is None else state.place + tokens.shape[1]
        return x, EmbeddingState(recent, state.position + tokens.shape[1], label, seen)

    def places(self) -> Tensor | None:
        """Position vectors: [T, width] to add to the vectors of values, or [T, width / 2] to append. Or None."""
        return self._grid(0, self.grid.positions) if self.has_grid else self.sinusoids

    def _find_sources(self, start: int | Tensor, length: int) -> Tensor:
        """Return the rows `start` to `start + length - 1` of `sources`, which may lie beyond the last row."""
        if self.last_values:
            return find_last_values(count_from(start, length, self.sources.device), self.last_values)
        return take_rows(self.sources, start, length)

    def _grid(self, start: int | Tensor, length: int) -> Tensor:
        places = count_from(start, length, self.row.weight.device, self.grid.positions)
        pixels = places // self.grid.channels
        return (
            self.row(pixels // self.grid.width)
            + self.column(pixels % self.grid.width)
            + self.channel(places % self.grid.channels)
        )

    def emit(self, builder: Builder) -> tuple[int, int]:
        """Emit a step; returns the buffer of the recent values and the buffer of the class (-1: no classes).

        The recent values are a ring with room for the values of one pass and for the `reach` values before them.
        """
        ring = self.reach + builder.window - 1
        recent = builder.state(ring, dtype=torch.int16)
        label = NO_BUFFER if self.classes is None else builder.state(1, self.default_label, torch.int64)
        # Without positions, the slots repeat after the first positions, and the table has only one period of them.
        period = ring if self.last_values else 0
        sources = self._find_sources(0, self.last_values + period) if period else self.sources
        slots = ring_slots(sources, ring).to(torch.int32)
        own, around, together = (builder.shared(part) for part in slots.tensor_split(self.bounds, dim=1))
        # If value and position are concatenated, the table of each is 0 in the columns of the other.
        width, place = builder.width, self.places()
        values = torch.zeros(0, width) if self.values is None else self.values
        table = builder.shared(functional.pad(values, (0, width - values.shape[1])))
        places = NO_BUFFER if place is None else builder.shared(functional.pad(place, (width - place.shape[1], 0)))
        classes = NO_BUFFER if self.classes is None else builder.shared(self.classes.weight)
        reader = {"ring": recent, "slots": own, "table": table, "places": places, "label": label, "classes": classes}
        sizes = {"D": width, "sources": self.slots, "levels": self.levels, "period": period}
        builder.emit("embed", output=builder.x, **reader, **sizes)
        if self.surroundings is not None:
            count = self.bounds[1] - self.bounds[0]
            numbers = builder.scratch("numbers", self.surroundings.input.in_features)
            if (differences := self.surroundings.differences) is None:
                reader = {"ring": recent, "slots": around, "values": count, "levels": self.levels}
                if self.surroundings.colours is not None:
                    reader["colours"] = builder.shared(self.surroundings.colours)
                builder.emit("look_around", output=numbers, **reader)
            else:
                sizes = differences.arguments(count)
                builder.emit("take_differences", output=numbers, ring=recent, slots=around, **sizes)
            # Many small differences beside a large one would be rounded to 0.
            hidden = builder.project(self.surroundings.input, numbers, "hidden", "gelu", differences is not None)
            builder.add(builder.project(self.surroundings.output, hidden, "branch"))
        if self.tables is not None:
            numbers = builder.scratch("numbers", self.tables.output.in_features)
            rows = builder.shared(self.tables.rows)
            sizes = {"levels": self.levels, "channels": self.grid.channels}
            builder.emit("look_up", output=numbers, ring=recent, slots=together, tables=rows, **sizes)
            builder.add(builder.project(self.tables.output, numbers, "branch"))
        return recent, label


def sinusoidal_table(positions: int, width: int) -> Tensor:
    """Return sines and cosines [positions, width] (Vaswani 2017, section 3.5), computed in float64 and rounded once."""
    frequencies = torch.exp(torch.arange(0, width, 2, dtype=torch.float64) * (-math.log(10_000.0) / width))
    angles = torch.arange(positions).unsqueeze(1) * frequencies
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1).float()
