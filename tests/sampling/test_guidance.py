"""Tests of guidance: the drawn distribution is p(x) (p(x | class) / p(x))^weight at every value."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from loops import loop_over
from machine import HAS_LIBRARY, NO_LIBRARY
from sampling.cases import complete_top, sample_values
from torch import Tensor

from linformer_cli.config import CLASS_GUIDANCE, ImageShape
from linformer_cli.errors import LintxError, UsageError
from linformer_cli.model.pixel_model import PixelModel
from linformer_cli.sampling.choose import Filters, UniformStreams, choose_guidance, guide
from linformer_cli.sampling.decode import Sampler

LABELS = [2, 0, 1]
CLASSES = {"classes": 3, "optional_class": True}
IMAGE = ImageShape(height=4, width=8, levels=16)


@pytest.fixture(params=["categorical", "mixture"])
def model(request, build_tiny_model) -> PixelModel:
    built: PixelModel = build_tiny_model(dtype=torch.float64, head=request.param, image=IMAGE, **CLASSES)
    built.embedding.classes.weight.data.mul_(8)  # the classes must matter
    return built


def draw(model: PixelModel, weight: float, batch: int = 3, engine: str = "reference", **settings: Any) -> Tensor:
    filters = replace(settings.pop("filters", Filters()), guidance=weight)
    sampler = Sampler(model, 5, filters, engine=engine, **settings)
    return torch.cat([part.values for part in sampler.iter_batches(range(3), batch, LABELS)])


@torch.no_grad()
def draw_in_parallel(
    model: PixelModel, weight: float, filters: Filters, known: Sequence[int] = (), classes: Sequence[int] = LABELS
) -> Tensor:
    """Draw after the `known` values with the parallel form, which reads the image from its start for every value."""
    positions, labels = model.config.image.positions, torch.tensor(classes)
    values, streams = torch.zeros(len(labels), positions, dtype=torch.int64), UniformStreams(5, range(len(labels)))
    values[:, : len(known)] = torch.tensor(known)
    for position in range(len(known), positions):
        of_class, of_none = (
            model.head.log_probabilities(model.attend(model.shift_values(values, given))[0])[:, position]
            for given in (labels, None)
        )
        shares = (of_none.exp() * (of_class.exp() / of_none.exp()) ** weight) ** (1 / filters.temperature)
        sums = (shares / shares.sum(dim=1, keepdim=True)).cumsum(dim=1)
        values[:, position] = (sums <= streams.take().unsqueeze(1)).sum(dim=1)
    return values


@loop_over(("weight", "filters"), [(3.0, Filters()), (0.5, Filters(temperature=0.7))])
def test_values_have_the_guided_distribution(model: PixelModel, weight: float, filters: Filters) -> None:
    drawn = draw(model, weight, filters=filters)
    assert torch.equal(drawn.long(), draw_in_parallel(model, weight, filters))
    assert not torch.equal(drawn, draw(model, 1.0, filters=filters))
    alone = draw(model, weight, batch=1, filters=filters)
    assert torch.equal(alone, drawn)


@loop_over(("known", "label"), [(0, 0), (1, 1), (24, 0), (24, 1)])
def test_completions_have_the_guided_distribution(model: PixelModel, known: int, label: int) -> None:
    original = torch.arange(32) % 16
    done = complete_top(Sampler(model, 5, Filters(guidance=3)), original, known, 3, label)
    expected = draw_in_parallel(model, 3, Filters(), original[:known].tolist(), [label] * 3)
    assert torch.equal(done.values, expected)
    plain = complete_top(Sampler(model, 5), original, known, 3, label)
    assert not torch.equal(done.values, plain.values)
    assert done.kept_bits_per_dim == pytest.approx(plain.kept_bits_per_dim, nan_ok=True)
    with pytest.raises(UsageError, match="choose a class"):
        complete_top(Sampler(model, filters=Filters(guidance=3)), original, known, 3)


def test_weight_0_draws_without_the_class(model: PixelModel) -> None:
    filters = Filters(top_k=model.head.levels)  # any filter makes a mixture draw from a table, as guidance does
    assert torch.equal(draw(model, 0.0, filters=filters), sample_values(model, range(3), 5, filters).values)


def test_weight_1_predicts_with_the_class() -> None:
    given, free = torch.randn(2, 4, 7, dtype=torch.float64)
    assert torch.allclose(guide(torch.cat([given, free]), 1.0), given)


@pytest.mark.skipif(not HAS_LIBRARY, reason="the engine 'native' needs the library")
@pytest.mark.parametrize("head", ["categorical", "mixture"])
def test_the_native_engine_draws_the_same_images(build_tiny_model, head: str) -> None:
    model = build_tiny_model(head=head, **CLASSES)
    assert torch.equal(draw(model, 2.0, engine="native"), draw(model, 2.0))
    original = torch.arange(64) % 16
    completed = [
        complete_top(Sampler(model, 5, Filters(guidance=2), engine=engine), original, 24, 3, label=1)
        for engine in ("native", "reference")
    ]
    assert torch.equal(completed[0].values, completed[1].values)
    whole = draw(model, 2.0, engine="native", products=torch.int8)
    assert torch.equal(draw(model, 2.0, batch=1, engine="native", products=torch.int8), whole)


def test_only_images_with_an_optional_class_are_guided_by_default(model: PixelModel, build_tiny_model) -> None:
    always_with_class = build_tiny_model(classes=3)
    assert choose_guidance(model, None, True) == CLASS_GUIDANCE
    assert choose_guidance(model, None, False) == choose_guidance(always_with_class, None, True) == 1
    assert choose_guidance(model, 0.0, True) == 0


def test_guidance_needs_a_class_and_a_model_that_needs_none(model: PixelModel, build_tiny_model) -> None:
    with pytest.raises(UsageError, match="choose a class"):
        Sampler(model, filters=Filters(guidance=2)).sample(range(2))
    with pytest.raises(UsageError, match="trained with --hide-class"):
        Sampler(build_tiny_model(classes=3), filters=Filters(guidance=2)).sample(range(2), [0, 1])
    for weight in (-1.0, 1001.0, float("inf"), float("nan")):
        with pytest.raises(UsageError, match="from 0 to 1000"):
            Filters(guidance=weight)


@pytest.mark.parametrize("engine", ["reference", "native"])
@pytest.mark.parametrize("batch", [1, 3])
def test_a_damaged_model_is_reported(build_tiny_model, engine: str, batch: int) -> None:
    if engine == "native" and not HAS_LIBRARY:
        pytest.skip(NO_LIBRARY)
    model = build_tiny_model(**CLASSES)
    model.embedding.classes.weight.data[3] = torch.nan  # of images without a class
    draw(model, 1.0, batch, engine)
    with pytest.raises(LintxError, match="not a finite number"):
        draw(model, 2.0, batch, engine)
