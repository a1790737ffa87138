"""Tests that images continue others in place as if each had read the values of its ancestor itself."""

import itertools

import pytest
import torch
from machine import needs_library
from sampling.cases import CHANGES, draw_tokens
from sampling.test_native_mechanisms import POSITIONS, build, every_variant

from linformer_cli.errors import LintxError
from linformer_cli.sampling.choose import Filters, UniformStreams
from linformer_cli.sampling.engines.native import NativeEngine

pytestmark = needs_library
__all__ = ["build"]

# Copies that wait for each other, swaps, images that nobody continues, and more or fewer images than before.
ANCESTORS = ([3, 3, 0, 5, 1, 1], [1, 2, 0, 4, 3, 5], [5, 0], [2, 2, 2, 2, 2, 2])


@every_variant
def test_forked_images_continue_their_ancestors(build, variant: str) -> None:
    model = build(variant)
    tokens, rest = draw_tokens(model, 6, POSITIONS)[:, :25], draw_tokens(model, 6, POSITIONS)[:, 25:31]
    for ancestors in map(torch.tensor, ANCESTORS):
        forked, reader = (NativeEngine(model, count, products=torch.int8) for count in (6, len(ancestors)))
        forked.read(tokens)
        forked.fork(ancestors)
        reader.read(tokens[ancestors])
        for token in rest[: len(ancestors)].unbind(dim=1):
            assert torch.equal(forked.step(token), reader.step(token))


@pytest.mark.parametrize("before", [1, 2, 4])
def test_every_mapping_takes_over_states_values_and_predictions(build_tiny_model, before: int) -> None:
    model = build_tiny_model(classes=3)
    engine = NativeEngine(model, 4)
    tokens = draw_tokens(model, before)
    for after in (1, 2, 3, 4):
        for ancestors in map(torch.tensor, itertools.product(range(before), repeat=after)):
            engine.start()
            engine.runner.call("resize", before)
            for token in tokens[:, :5].unbind(dim=1):
                parameters = engine.step(token)
            expected = [part[:before].clone()[ancestors] for part in (*engine.states, parameters)]
            engine.fork(ancestors)
            found = [
                part[:after]
                for part in (*engine.states, engine.runner.view(engine.program.output, 4, torch.float32)[:, :16])
            ]
            assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
            values = engine.runner.values(4, 64)[:after, :4]
            assert torch.equal(values, tokens[ancestors, 1:5])


@pytest.mark.parametrize("guidance", [1.0, 2.0])
@pytest.mark.parametrize("changes", ["as it is", "mixture", "pixels"])
def test_forked_images_go_on_drawing(build_tiny_model, changes: str, guidance: float) -> None:
    """The last drawn values were not read yet. With guidance, both rows of an image follow its ancestor."""
    model = build_tiny_model(**CHANGES[changes], classes=3, optional_class=True)
    filters, ancestors, labels = Filters(guidance=guidance), torch.tensor([2, 0, 0]), torch.tensor([0, 1, 2])
    starts = labels if guidance == 1 else torch.cat([labels, torch.full((3,), 3)])
    drawn = []
    for forks in (True, False):
        engine, streams = NativeEngine(model, len(starts)), UniformStreams(4, range(3))
        begun = engine.draw_values(engine.step(starts), streams, filters, 20)[ancestors].long()
        if forks:
            engine.fork(ancestors)
            tokens = begun[:, -1].repeat(filters.rows_per_image)
            parameters = engine.step(tokens)
        else:
            own = torch.cat([labels[ancestors, None], begun], dim=1)
            free = torch.cat([torch.full((3, 1), 3), begun], dim=1)
            parameters = engine.read(own if guidance == 1 else torch.cat([own, free]))
        drawn.append(engine.draw_values(parameters, streams, filters, 40))
    assert torch.equal(*drawn)
    assert len(torch.unique(drawn[0], dim=0)) == 3


def test_wrong_ancestors_are_refused(build_tiny_model, raises_one_line) -> None:
    engine = NativeEngine(build_tiny_model(), 2)
    for wrong in (-1, 2):
        with raises_one_line(LintxError, "no such image"):
            engine.fork(torch.tensor([0, wrong]))
    for count in (0, 3):
        with raises_one_line(LintxError, "opened for fewer images"):
            engine.fork(torch.zeros(count, dtype=torch.int64))
