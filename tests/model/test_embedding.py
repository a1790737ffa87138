"""Compares the neighbours of a position with a plain computation, and tests the bounded state."""

import itertools
import math
from typing import Any, Literal

import numpy as np
import pytest
import torch
from loops import loop_over
from torch import Tensor

from linformer_cli.attention.base import state_tensors
from linformer_cli.config import ImageShape, ModelConfig
from linformer_cli.model.embedding import PixelEmbedding, context_sources, find_same_channel, sinusoidal_table

Context = Literal["previous", "recent", "neighbours", "wide", "hashed"]
CONTEXTS = ["previous", "recent", "neighbours", "wide", "hashed"]
# These contexts use matrix products, not only tables of single values.
WIDER = ("wide", "hashed")
CPU = torch.device("cpu")
IMAGES = [(4, 5, 3), (4, 5, 1), (3, 1, 3), (3, 1, 1), (1, 4, 3), (3, 2, 1), (1, 1, 3), (1, 1, 1)]


def visible_places(context: Context, image: ImageShape, place: int) -> list[int]:
    """Return the indices of the values that position `place` reads, computed from rows, columns and channels."""
    if context == "previous":
        return [place - 1] if place else []
    if context == "recent":
        return list(range(max(0, place - 4), place))
    row, rest = divmod(place, image.width * image.channels)
    column, channel = divmod(rest, image.channels)
    places = []
    for other_row in range(image.height):
        for other_column in range(image.width):
            for other_channel in range(image.channels):
                up, left = row - other_row, column - other_column
                own = up == 0 and left == 0 and other_channel < channel
                beside = up == 0 and left in (1, 2)
                above = (up == 1 and left in (-1, 0, 1)) or (up == 2 and left == 0)
                around = (up in (1, 2, 3) and -4 <= left <= 4) or (up == 0 and 1 <= left <= 4)
                if own or beside or above or (context in WIDER and around):
                    places.append((other_row * image.width + other_column) * image.channels + other_channel)
    return places


def build(context: Context, size: tuple[int, int, int], embedding: str = "grid", **changes: Any) -> PixelEmbedding:
    height, width, channels = size
    image = ImageShape.model_validate({"height": height, "width": width, "channels": channels})
    config = ModelConfig.model_validate({"width": 16, "context": context, "embedding": embedding, "image": image})
    torch.manual_seed(3)
    found = PixelEmbedding(config.model_copy(update=changes)).double()
    if found.tables is not None:  # initially zero
        torch.nn.init.normal_(found.tables.rows)
    return found


def draw_tokens(embedding: PixelEmbedding, batch: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(embedding.levels, (batch, embedding.grid.positions), generator=generator)


def embed(embedding: PixelEmbedding, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        return embedding(tokens, embedding.init_state(len(tokens), CPU))[0]


@loop_over("context", ["previous", "recent", "neighbours"])
@loop_over("size", IMAGES)
def test_sources_match_the_visible_values(context: Context, size: tuple[int, int, int]) -> None:
    image = ImageShape.model_validate(dict(zip(("height", "width", "channels"), size, strict=True)))
    sources = context_sources(context, image)
    assert len(sources) == image.positions
    for place, row in enumerate(sources.tolist()):
        assert sorted(source for source in row if source >= 0) == visible_places(context, image, place)


@loop_over("size", IMAGES)
def test_a_slot_has_the_same_direction_at_every_position(size: tuple[int, int, int]) -> None:
    """The test lists the directions of all slots as (rows up, columns left, channel)."""
    image = ImageShape.model_validate(dict(zip(("height", "width", "channels"), size, strict=True)))
    directions = [(0, 0, channel) for channel in range(image.channels - 1)]
    for up, left in ((0, 1), (0, 2), (1, 1), (1, 0), (1, -1), (2, 0)):
        directions += [(up, left, channel) for channel in range(image.channels)]
    sources = context_sources("neighbours", image)
    assert sources.shape == (image.positions, len(directions))
    for place, row in enumerate(sources.tolist()):
        for (up, left, channel), source in zip(directions, row, strict=True):
            if source >= 0:
                pixel, own = source // image.channels, place // image.channels
                assert (own // image.width - pixel // image.width, own % image.width - pixel % image.width) == (
                    up,
                    left,
                )
                assert source % image.channels == channel


@loop_over("context", CONTEXTS)
@loop_over("positional, size", [("grid", (4, 5, 3)), ("paper", (4, 5, 1)), ("none", (4, 5, 3))])
def test_a_vector_depends_only_on_its_context(context: Context, positional: str, size: tuple[int, int, int]) -> None:
    embedding = build(context, size, positional)
    tokens = draw_tokens(embedding, 1)
    positions = embedding.grid.positions
    # Row i of the batch changes value i, which is token i + 1. The last value is never a token.
    changed = tokens.repeat(positions - 1, 1)
    for place in range(positions - 1):
        changed[place, place + 1] = (changed[place, place + 1] + 100) % 256
    moved = (embed(embedding, changed) - embed(embedding, tokens)).abs().amax(dim=-1)
    for place in range(positions):
        seen = visible_places(context, embedding.grid, place)
        assert [source for source in range(positions - 1) if moved[source, place] > 1e-3] == seen
        assert [source for source in range(positions - 1) if moved[source, place] > 1e-9] == seen
        assert all(source < place for source in seen)


@loop_over("size", IMAGES)
def test_the_same_channel_of_other_pixels_is_found(size: tuple[int, int, int]) -> None:
    image = ImageShape.model_validate(dict(zip(("height", "width", "channels"), size, strict=True)))
    offsets = [(0, 1), (1, 0), (1, 1), (1, -1)]
    expected = torch.full((*size, len(offsets)), -1)
    for row, column, channel in itertools.product(*map(range, size)):
        for slot, (up, left) in enumerate(offsets):
            if row >= up and 0 <= column - left < image.width:
                expected[row, column, channel, slot] = ((row - up) * image.width + column - left) * size[2] + channel
    assert torch.equal(find_same_channel(image, offsets), expected.flatten(0, 2))


@pytest.mark.parametrize("channels", [1, 3])
def test_neighbour_tables_read_four_pixels_of_one_channel(channels: int) -> None:
    """The test changes one value at a time and looks at the difference between `hashed` and `wide`."""
    hashed, wide = (build(context, (4, 5, channels)) for context in ("hashed", "wide"))
    wide.load_state_dict({name: part for name, part in hashed.state_dict().items() if "tables" not in name})
    hashed.tables.output.weight.data[:, :16] = 0  # only the table of all four values is left
    tokens = draw_tokens(hashed, 1)
    positions = hashed.grid.positions
    changed = tokens.repeat(positions, 1)
    for place in range(positions - 1):
        changed[place + 1, place + 1] = (changed[place + 1, place + 1] + 100) % 256
    added = embed(hashed, changed) - embed(wide, changed)
    moved = (added[1:] - added[:1]).abs().amax(dim=-1) > 1e-3
    sources = find_same_channel(hashed.grid, [(0, 1), (1, 0), (1, 1), (1, -1)])
    for place, row in enumerate(sources.tolist()):
        assert moved[:, place].nonzero().flatten().tolist() == sorted(source for source in row if source >= 0)


@loop_over("context", ["previous", "recent", "neighbours"])
@loop_over("size", [(3, 4, 3), (4, 3, 1), (1, 1, 1)])
def test_grid_vectors_are_sums_of_table_rows(context: Context, size: tuple[int, int, int]) -> None:
    """Each slot adds one row, with a separate row for missing values. Row, column and channel add one row each."""
    embedding = build(context, size)
    image, tokens = embedding.grid, draw_tokens(embedding)
    vectors = embed(embedding, tokens)
    tables = embedding.values.detach().unflatten(0, (-1, 257))
    for place, row in enumerate(context_sources(context, image).tolist()):
        pixel, channel = divmod(place, image.channels)
        expected = torch.stack([embedding.row.weight[pixel // image.width]] * 2).detach()
        expected = expected + embedding.column.weight[pixel % image.width] + embedding.channel.weight[channel]
        for slot, source in enumerate(row):
            looked_up = tokens[:, source + 1] if source >= 0 else torch.tensor([256, 256])
            expected = expected + tables[slot, looked_up]
        torch.testing.assert_close(vectors[:, place], expected.detach(), rtol=0, atol=1e-12)


def test_paper_vectors_concatenate_value_and_position() -> None:
    embedding = build("previous", (3, 4, 3), "paper")
    tokens = draw_tokens(embedding)
    vectors = embed(embedding, tokens)
    table = embedding.values.detach()
    assert table.shape == (257, 8)
    assert torch.equal(vectors[:, 0, :8], table[[256, 256]])
    assert torch.equal(vectors[:, 1:, :8], table[tokens[:, 1:]])
    assert torch.equal(vectors[0, :, 8:], vectors[1, :, 8:])
    for place in range(36):
        for pair in range(4):
            angle = place / 10_000 ** (2 * pair / 8)
            assert vectors[0, place, 8 + 2 * pair].item() == pytest.approx(math.sin(angle), abs=1e-5)
            assert vectors[0, place, 9 + 2 * pair].item() == pytest.approx(math.cos(angle), abs=1e-5)
    assert not any(parameter is embedding.sinusoids for parameter in embedding.parameters())


@pytest.mark.parametrize("positions", [784, 3072])
def test_sinusoids_are_computed_in_float64_and_rounded_once(positions: int) -> None:
    table = sinusoidal_table(positions, 128)
    assert table.dtype == torch.float32
    angles = np.arange(positions)[:, None] * 10_000.0 ** (-np.arange(0, 128, 2) / 128)
    expected = np.stack([np.sin(angles), np.cos(angles)], axis=-1).reshape(positions, 128)
    # This is half the spacing of float32 numbers just below 1.
    assert np.abs(table.numpy() - expected).max() <= 2.0**-25 + 1e-11


@loop_over("context", CONTEXTS)
@loop_over(
    "positional, size",
    [("grid", (4, 4, 3)), ("grid", (5, 5, 1)), ("paper", (4, 4, 3)), ("paper", (3, 1, 1)), ("none", (1, 1, 1))],
)
@loop_over("block", [1, 7])
def test_blocks_match_a_single_pass(context: Context, positional: str, size: tuple[int, int, int], block: int) -> None:
    embedding = build(context, size, positional)
    tokens = draw_tokens(embedding)
    state, parts = embedding.init_state(2, CPU), []
    with torch.no_grad():
        for part in tokens.split(block, dim=1):
            before = state.recent.clone(), state.position.clone()
            x, following = embedding(part, state)
            assert torch.equal(state.recent, before[0]) and torch.equal(state.position, before[1])
            parts.append(x)
            state = following
    # Table look-ups are equal bit for bit. Products may be summed in a different order.
    tolerance = 1e-12 if context in WIDER else 0
    torch.testing.assert_close(torch.cat(parts, dim=1), embed(embedding, tokens), rtol=0, atol=tolerance)
    assert int(state.position) == embedding.grid.positions


@pytest.mark.parametrize("channels", [1, 3])
def test_the_state_does_not_depend_on_the_height(channels: int) -> None:
    reaches = set()
    for height in (3, 8, 40):
        state = build("neighbours", (height, 6, channels)).init_state(2, CPU)
        assert state.recent.dtype == torch.int16
        reaches.add(state.recent.shape[1])
    # The state covers two rows and all earlier channels of the current pixel.
    assert reaches == {2 * 6 * channels + channels - 1}
    assert build("previous", (40, 6, channels)).init_state(2, CPU).recent.shape == (2, 1)
    # The state covers three rows and four pixels to the left.
    wide = build("wide", (40, 9, channels)).init_state(2, CPU).recent
    assert wide.shape == (2, (3 * 9 + 4) * channels + channels - 1)


@pytest.mark.parametrize("context", CONTEXTS)
def test_a_state_holds_no_larger_storage(context: Context) -> None:
    embedding = build(context, (40, 6, 1), classes=3)
    with torch.no_grad():
        _, state = embedding(draw_tokens(embedding) % 3, embedding.init_state(2, CPU))
    for tensor in state_tensors(state):
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
