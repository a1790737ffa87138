"""Tests of sampling. An image depends only on the seed and its number, and follows the model's distribution."""

import itertools
import math
import weakref

import numpy as np
import pytest
import torch
from sampling.cases import sample_values

from linformer_cli.config import ImageShape
from linformer_cli.data.sequence import values_to_images
from linformer_cli.errors import LintxError
from linformer_cli.model.pixel_model import PixelModel
from linformer_cli.sampling.choose import Filters, UniformStreams
from linformer_cli.sampling.decode import Sampler, sample_images
from linformer_cli.sampling.engines import ReferenceEngine
from linformer_cli.system.memory import work_in_batches

KINDS = [("linear", "categorical"), ("softmax", "mixture")]
KINDS += [pytest.param(kind, marks=pytest.mark.slow) for kind in (("linear", "mixture"), ("softmax", "categorical"))]


@pytest.fixture(params=KINDS, ids="-".join)
def model(request, build_tiny_model) -> PixelModel:
    attention, head = request.param
    return build_tiny_model(dtype=torch.float64, attention=attention, head=head)


def collect(model: PixelModel, count: int, batch: int, seed: int = 0, filters: Filters | None = None) -> torch.Tensor:
    parts = Sampler(model, seed, filters).iter_batches(range(count), batch)
    return torch.cat([part.values for part in parts])


# The same images


def test_images_do_not_depend_on_the_batch(model) -> None:
    alone, threes, together = (collect(model, 5, batch, seed=5) for batch in (1, 3, 5))
    assert alone.shape == (5, 64)
    assert torch.equal(alone, together)
    assert torch.equal(threes, together)
    assert len(torch.unique(together, dim=0)) == 5
    assert torch.equal(sample_values(model, range(3, 5), seed=5).values, together[3:])


def test_sampling_neither_uses_nor_changes_the_global_random_state(model) -> None:
    torch.manual_seed(1)
    before, state = sample_values(model, range(2)).values, torch.get_rng_state()
    torch.manual_seed(2)
    assert torch.equal(sample_values(model, range(2)).values, before)
    torch.manual_seed(1)
    assert torch.equal(torch.get_rng_state(), state)


# What is drawn


def chi_square(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    expected = probabilities * counts.sum()
    assert expected.min() > 5, "too few images for a chi-square test"
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("kind", KINDS, ids="-".join)
def test_whole_images_follow_their_likelihood(build_tiny_model, kind) -> None:
    attention, head = kind
    model = build_tiny_model(attention=attention, head=head, image=ImageShape(height=1, width=2, levels=4))
    all_images = torch.cartesian_prod(torch.arange(4), torch.arange(4))
    probabilities = torch.exp(-model.nats(all_images).detach().double().sum(dim=1))
    assert float(probabilities.sum()) == pytest.approx(1, abs=1e-5)
    values = sample_values(model, range(20_000), seed=2).values.long()
    counts = torch.bincount(values[:, 0] * 4 + values[:, 1], minlength=16)
    assert chi_square(counts, probabilities) < 44.3
    independent = probabilities.view(4, 4).sum(1, keepdim=True) * probabilities.view(4, 4).sum(0, keepdim=True)
    assert chi_square(counts, independent.flatten()) > 100


def test_filtered_draws_follow_the_filtered_distribution(build_tiny_model) -> None:
    model = build_tiny_model(image=ImageShape(height=1, width=2, levels=16))
    first = model.head.log_probabilities(model.attend(torch.zeros(1, 1, dtype=torch.int64))[0][0, 0]).exp().detach()
    kept = first.argsort(descending=True)[:3]
    values = sample_values(model, range(5_000), filters=Filters(top_k=3)).values[:, 0].long()
    counts = torch.bincount(values, minlength=16)[kept]
    assert int(counts.sum()) == 5_000
    # With two degrees of freedom, one seed in ten thousand exceeds 18.4.
    assert chi_square(counts, first[kept] / first[kept].sum()) < 18.4


def test_each_value_is_drawn_from_the_prediction_of_the_parallel_pass(model) -> None:
    # Draw every value again from the finished images, with the same random numbers.
    values = sample_values(model, range(3), seed=4).values.long()
    parameters = model.attend(model.shift_values(values))[0].detach()
    streams = UniformStreams(4, range(3))
    for position in range(values.shape[1]):
        assert torch.equal(model.head.draw(parameters[:, position], streams.take()), values[:, position])


# The engine


def test_every_value_takes_one_step(build_tiny_model, monkeypatch) -> None:
    model = build_tiny_model()
    steps = []
    take_step = PixelModel.step

    def counted(self: PixelModel, tokens_t: torch.Tensor, state: object) -> object:
        steps.append(tokens_t.tolist())
        return take_step(self, tokens_t, state)  # type: ignore[arg-type]

    monkeypatch.setattr(PixelModel, "step", counted)
    values = sample_values(model, range(2), engine="reference").values
    # Steps take the start token and every value but the last. No prediction needs the last value.
    assert steps == [[0, 0], *values[:, :-1].T.tolist()]
    parameters, state = take_step(model, model.start_tokens(2), model.init_state(2))
    engine = ReferenceEngine(model, 2, state)
    assert torch.equal(engine.draw_values(parameters, UniformStreams(0, range(2)), Filters(), 64), values)


def test_the_largest_value_is_not_clipped(build_tiny_model) -> None:
    model = build_tiny_model(image=ImageShape(height=2, width=2, levels=256))
    model.head.projection.bias.data[255] = 50.0
    assert (sample_values(model, range(2)).values.long() == 255).all()
    assert (sample_images(model, 2) == 255).all()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_model_that_predicts_nan_is_refused(build_tiny_model, raises_one_line, value) -> None:
    model = build_tiny_model()
    model.head.projection.bias.data[3] = value
    with raises_one_line(LintxError, "not a finite number", "damaged"):
        sample_images(model, 2)


@pytest.mark.parametrize("known", [0, 60])
def test_nan_anywhere_in_an_image_is_noticed(build_tiny_model, raises_one_line, known) -> None:
    """NaN is noticed even at a position between two of the engine's checks."""
    model = build_tiny_model()
    engine = ReferenceEngine(model, 2, model.attend(torch.zeros(2, known, dtype=torch.int64))[1] if known else None)
    first = engine.step(model.start_tokens(2))
    steps = itertools.count(1)
    step = engine.step

    def fail_at_the_end(tokens_t: torch.Tensor) -> torch.Tensor:
        return step(tokens_t) * (math.nan if next(steps) == 63 - known else 1)

    engine.step = fail_at_the_end  # type: ignore[method-assign]
    with raises_one_line(LintxError, "not a finite number", "damaged"):
        engine.draw_values(first, UniformStreams(0, range(2)), Filters(), 64 - known)


# Memory that runs out


def refuse_above(monkeypatch: pytest.MonkeyPatch, model: PixelModel, limit: int, error: Exception) -> list[int]:
    """Make steps of more than `limit` images raise `error`, and return a list that collects the batch sizes."""
    tried, step = [], model.step

    def limited(tokens: torch.Tensor, state: object) -> object:
        if not tried or tried[-1] != len(tokens):
            tried.append(len(tokens))
        if len(tokens) > limit:
            raise error
        return step(tokens, state)  # type: ignore[arg-type]

    monkeypatch.setattr(model, "step", limited)
    return tried


def test_the_batch_is_halved_if_memory_runs_out(model, monkeypatch) -> None:
    expected = collect(model, 11, 11, seed=4)
    tried = refuse_above(monkeypatch, model, 3, torch.OutOfMemoryError("CUDA out of memory"))
    halved: list[int] = []
    parts = list(Sampler(model, 4).iter_batches(range(11), 10, on_halve=halved.append))
    assert halved == [5, 2]
    assert [len(part.values) for part in parts] == [2, 2, 2, 2, 2, 1]
    assert torch.equal(torch.cat([part.values for part in parts]), expected)
    assert tried[:3] == [10, 5, 2]


def test_one_image_that_does_not_fit_is_an_error(model, monkeypatch, raises_one_line) -> None:
    refuse_above(monkeypatch, model, 0, torch.OutOfMemoryError("CUDA out of memory"))
    with raises_one_line(LintxError, "not enough memory", "a single image"):
        collect(model, 4, 4)


def test_other_errors_do_not_halve_the_batch(model, monkeypatch) -> None:
    tried = refuse_above(monkeypatch, model, 0, RuntimeError("shapes do not fit"))
    with pytest.raises(RuntimeError, match="shapes do not fit"):
        collect(model, 4, 4)
    assert tried == [4]


def test_a_failed_attempt_frees_its_memory_first(model, monkeypatch) -> None:
    """Within the exception handler, the traceback still keeps every tensor of the failed attempt in memory."""
    alive: list[weakref.ref[torch.Tensor]] = []

    def attempt(indices: range) -> torch.Tensor:
        assert all(reference() is None for reference in alive)
        large = torch.zeros(len(indices), 1000)
        alive.append(weakref.ref(large))
        if len(indices) > 1:
            raise MemoryError
        return large.sum(dim=1)

    assert len(list(work_in_batches(range(4), 4, attempt))) == 4
    assert len(alive) == 6


# Classes


def test_every_image_has_its_own_class(build_tiny_model) -> None:
    model = build_tiny_model(classes=3)
    labels = [2, 2, 0, 1, 0]
    images = sample_images(model, 5, seed=4, labels=labels)
    for index, label in enumerate(labels):
        for other in range(3):
            alone = sample_values(model, range(index, index + 1), 4, labels=[other] * 5)
            same = np.array_equal(values_to_images(alone.values, model.config.image)[0], images[index])
            assert same == (other == label)
    assert np.array_equal(sample_images(model, 5, batch=2, seed=4, labels=labels), images)


def test_default_classes_rotate_for_any_batch_size(build_tiny_model) -> None:
    model = build_tiny_model(classes=3)
    expected = sample_images(model, 5, seed=4, labels=[0, 1, 2, 0, 1])
    for batch in (1, 2, 64):
        assert np.array_equal(sample_images(model, 5, batch=batch, seed=4), expected)
