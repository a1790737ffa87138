"""Tests of keeping values anywhere: exactness by enumeration, the same images in all engines, and seeds."""

import itertools
import math
from collections import Counter

import pytest
import torch
from machine import needs_library
from sampling.cases import CHANGES
from sampling.test_native_mechanisms import POSITIONS, build, every_variant
from torch import Tensor

from linformer_cli.config import ImageShape
from linformer_cli.errors import LintxError
from linformer_cli.model.pixel_model import PixelModel
from linformer_cli.sampling.choose import Filters, UniformStreams, filter_log_probabilities
from linformer_cli.sampling.complete import complete_values
from linformer_cli.sampling.decode import Sampler
from linformer_cli.sampling.engines import ENGINES
from linformer_cli.sampling.engines.base import Engine
from linformer_cli.sampling.engines.cuda import CudaEngine
from linformer_cli.sampling.engines.native import NativeEngine
from linformer_cli.sampling.engines.reference import ReferenceEngine
from linformer_cli.sampling.particles import KeptImage, draw_particles
from linformer_cli.system import memory
from linformer_cli.system.signals import never_stop

__all__ = ["build"]
TINY = ImageShape(height=3, width=3, levels=4)
# Values from the middle, the end and after the first drawn value are kept.
GIVEN = [-1, 2, -1, -1, 0, 3, -1, 1, 1]
EVERY_ENGINE = [pytest.param(NativeEngine, marks=needs_library), ReferenceEngine]


def keep(
    engine: Engine,
    given: Tensor,
    index: int = 0,
    seed: int = 0,
    filters: Filters | None = None,
    label: int | None = None,
) -> KeptImage:
    filters, model = filters or Filters(), engine.model
    labels = None if label is None else torch.tensor([label])
    starts = [model.start_tokens(1, labels), *([model.start_tokens(1)] if filters.guidance != 1 else [])]
    engine.start()
    return engine.keep_values(torch.cat(starts), given, UniformStreams(seed, [index]), filters)


@pytest.fixture
def tiny(build_tiny_model) -> PixelModel:
    """A model of 3 x 3 values with strong differences between its predictions."""
    model = build_tiny_model(image=TINY, classes=3, optional_class=True)
    model.head.projection.weight.data.mul_(2)
    return model


@torch.no_grad()
def enumerate_images(model: PixelModel, given: Tensor, guidance: float, label: int | None) -> tuple[Tensor, Tensor]:
    """All images [n, T] with the given values, and their log probabilities with guidance."""
    free = [n for n, value in enumerate(given.tolist()) if value < 0]
    images = given.repeat(model.config.image.levels ** len(free), 1)
    images[:, free] = torch.tensor(list(itertools.product(range(model.config.image.levels), repeat=len(free))))

    def predict(labels: Tensor | None) -> Tensor:
        return model.head.log_probabilities(model.attend(model.shift_values(images, labels))[0])

    logs = [predict(None if label is None else torch.full((len(images),), label))]
    if guidance != 1:
        logs.append(predict(None))
    filtered = filter_log_probabilities(torch.cat(logs), Filters(guidance=guidance))
    return images, filtered.gather(2, images.unsqueeze(2)).sum(dim=(1, 2))


def assert_exact(engine: Engine, count: int, guidance: float) -> None:
    """The images have the distribution that enumeration finds, by chi-square."""
    given, label, filters = torch.tensor(GIVEN), 1, Filters(guidance=guidance)
    images, logs = enumerate_images(engine.model, given, guidance, label)
    found = [keep(engine, given, index, 5, filters, label) for index in range(count)]
    assert all(bool(((image.values == given) | (given < 0)).all()) for image in found)
    # The mean of the estimated probabilities is unbiased.
    mean = math.log2(sum(2**-image.bits for image in found) / count)
    assert mean == pytest.approx(float(logs.logsumexp(dim=0)) / math.log(2), abs=0.03)
    drawn = Counter(tuple(image.values.tolist()) for image in found)
    expected = (logs.softmax(dim=0) * count).tolist()
    pairs = [(drawn[tuple(image)], wanted) for image, wanted in zip(images.tolist(), expected, strict=True)]
    often = [(seen, wanted) for seen, wanted in pairs if wanted >= 5]
    freedom = len(often)
    assert freedom > 5
    rest = count - sum(seen for seen, _ in often), count - sum(wanted for _, wanted in often)
    square = sum((seen - wanted) ** 2 / wanted for seen, wanted in [*often, rest])
    # Wilson and Hilferty: the cube root of chi-square is nearly normal. This is three standard deviations.
    assert square < freedom * (1 - 2 / (9 * freedom) + 3 * math.sqrt(2 / (9 * freedom))) ** 3


@needs_library
@pytest.mark.parametrize("guidance", [1.0, 2.0])
def test_the_images_have_the_exact_distribution_of_the_model(tiny, guidance: float) -> None:
    assert_exact(NativeEngine(tiny, 512), 1000, guidance)


@pytest.mark.slow
def test_the_images_of_the_reference_have_the_exact_distribution_of_the_model(tiny) -> None:
    assert_exact(ReferenceEngine(tiny, 128), 300, 1.0)


# Kept: the first values, a part in the middle, and the end.
def hide(image: Tensor) -> Tensor:
    numbers = torch.arange(len(image))
    return torch.where((numbers % 7 < 3) & (numbers > 5) & (numbers < len(image) - 4), -1, image)


NAMES = ("as it is", "mixture", "colour", "pixels", "palette", "classes", "no positions")
VARIANTS = {name: CHANGES[name] for name in NAMES if name in CHANGES} | {"softmax": {"attention": "softmax"}}


@needs_library
@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_all_engines_keep_the_same_values_with_the_same_images(build_tiny_model, changes) -> None:
    model = build_tiny_model(**changes)
    shape = model.config.image
    given = hide(torch.arange(shape.positions) * 5 % shape.levels)
    kinds = [kind for kind in ENGINES.values() if kind.refusal(model) is None]
    for filters in (Filters(), Filters(temperature=0.7, top_k=3)):
        found = [keep(kind(model, 12), given, 3, 1, filters) for kind in kinds]
        for image in found[1:]:
            assert torch.equal(image.values, found[0].values)
            assert image.bits == pytest.approx(found[0].bits, rel=1e-4)
            assert (image.effective, image.fewest) == pytest.approx((found[0].effective, found[0].fewest), rel=1e-2)
        assert 1 <= found[0].fewest <= found[0].effective <= 12


@pytest.mark.parametrize("attention", ["linear", "softmax"])
def test_the_engine_of_graphs_forks_its_rows(build_tiny_model, attention: str) -> None:
    model = build_tiny_model(attention=attention, classes=3, optional_class=True)
    given, filters = hide(torch.arange(64) % 16), Filters(guidance=2)
    images = [keep(kind(model, 16), given, 3, 1, filters, label=2) for kind in (CudaEngine, ReferenceEngine)]
    assert torch.equal(images[0].values, images[1].values)
    assert images[0].bits == pytest.approx(images[1].bits, rel=1e-5)


@needs_library
@every_variant
def test_every_mechanism_keeps_values(build, variant: str) -> None:
    """The loop in Python steps and forks the same engine, so only the loops can differ."""
    model = build(variant)
    given, filters = hide(torch.arange(POSITIONS) * 5 % 16), Filters()
    engine = NativeEngine(model, 8, products=torch.int8)
    found = keep(engine, given, 3, 1)
    engine.start()
    streams = UniformStreams(1, [3])
    expected = draw_particles(engine, model.start_tokens(1), given, streams, filters, never_stop)
    assert torch.equal(found.values, expected.values)
    assert found.bits == pytest.approx(expected.bits, rel=1e-6)
    assert found.fewest == pytest.approx(expected.fewest, rel=1e-4)


@needs_library
@pytest.mark.parametrize("guidance", [1.0, 2.0])
@pytest.mark.parametrize("attention", ["linear", "softmax"])
def test_int8_images_are_the_same_with_every_instruction_set_and_number_of_threads(
    build_tiny_model, instruction_set, monkeypatch, attention: str, guidance: float
) -> None:
    model = build_tiny_model(attention=attention, classes=3, optional_class=True)
    given, filters = hide(torch.arange(64) % 16), Filters(guidance=guidance)
    first = keep(NativeEngine(model, 32, products=torch.int8), given, 3, 1, filters, label=2)
    monkeypatch.undo()
    engine = NativeEngine(model, 32, products=torch.int8)
    engine.use_threads(3)
    again = keep(engine, given, 3, 1, filters, label=2)
    assert torch.equal(first.values, again.values)
    assert (first.bits, first.effective, first.fewest) == (again.bits, again.effective, again.fewest)


@pytest.mark.parametrize("kind", EVERY_ENGINE)
def test_an_image_depends_only_on_the_seed_and_its_number(build_tiny_model, kind) -> None:
    engine, given = kind(build_tiny_model(), 8), hide(torch.arange(64) % 16)
    first, again, other, seed = (keep(engine, given, *key).values for key in ((0, 0), (0, 0), (1, 0), (0, 1)))
    assert torch.equal(first, again)
    assert not torch.equal(first, other) and not torch.equal(first, seed)


@pytest.mark.parametrize("kind", EVERY_ENGINE)
def test_images_with_all_values_or_none(build_tiny_model, kind) -> None:
    model = build_tiny_model()
    values = torch.arange(64) % 16
    whole = keep(kind(model, 4), values)
    assert torch.equal(whole.values, values)
    assert whole.bits == pytest.approx(float(model.nats(values.unsqueeze(0)).detach().sum()) / math.log(2), rel=1e-4)
    assert whole.effective == whole.fewest == 4
    free = keep(kind(model, 4), torch.full((64,), -1))
    assert free.bits == 0 and free.effective == free.fewest == 4 and free.values.min() >= 0
    single = keep(kind(model, 1), hide(values))
    assert single.effective == 1 and len(single.values) == 64


@pytest.mark.parametrize("kind", EVERY_ENGINE)
def test_a_prediction_of_nan_is_an_error(build_tiny_model, raises_one_line, kind) -> None:
    model = build_tiny_model()
    model.head.projection.bias.data[3] = math.nan
    for given in (torch.zeros(64, dtype=torch.int64), torch.full((64,), -1)):
        with raises_one_line(LintxError, "not a finite number"):
            keep(kind(model, 4), given)


@needs_library
def test_wrong_calls_are_refused(build_tiny_model, raises_one_line) -> None:
    engine, given = NativeEngine(build_tiny_model(), 4), torch.full((64,), -1)
    with raises_one_line(LintxError, "no values are kept"):
        engine.runner.call("pick", torch.empty(3, dtype=torch.float64))
    with raises_one_line(LintxError, "one image"):
        engine.runner.call("keep", 4, given)
    engine.runner.call("resize", 1)
    for count in (0, 5):
        with raises_one_line(LintxError, "opened for fewer images"):
            engine.runner.call("keep", count, given)
    for wrong in (-2, 16):
        given[5] = wrong
        with raises_one_line(LintxError, "0 to 15, or -1"):
            engine.runner.call("keep", 4, given)


def test_particles_need_free_memory_unless_their_engine_is_there(
    build_tiny_model, monkeypatch, raises_one_line
) -> None:
    sampler, original = Sampler(build_tiny_model()), torch.arange(64) % 16
    kept = torch.arange(64) >= 32
    complete_values(sampler, original, kept, 1, particles=4)
    monkeypatch.setattr(memory, "measure_free_memory", lambda device: 10)
    complete_values(sampler, original, kept, 1, particles=4)
    with raises_one_line(LintxError, "5 particles need", "10 B are free"):
        complete_values(sampler, original, kept, 1, particles=5)
