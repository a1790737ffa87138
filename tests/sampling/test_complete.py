"""Tests of completing images: the known part is unchanged and read once, and bits are counted per part."""

import math

import pytest
import torch
from loops import loop_over
from sampling.cases import complete_top, sample_values

from linformer_cli.errors import LintxError
from linformer_cli.model.pixel_model import PixelModel
from linformer_cli.sampling.choose import Filters, UniformStreams
from linformer_cli.sampling.decode import Sampler
from linformer_cli.sampling.engines import NATIVE, ReferenceEngine
from linformer_cli.sampling.engines.native import NativeEngine

# complete_values


@pytest.fixture(params=["linear", "softmax"])
def model(request, build_tiny_model) -> PixelModel:
    return build_tiny_model(dtype=torch.float64, attention=request.param)


@pytest.fixture
def original() -> torch.Tensor:
    return torch.randint(0, 16, (64,), generator=torch.Generator().manual_seed(9))


@loop_over("known", [1, 24, 63])
def test_the_known_part_is_unchanged_and_the_rest_is_drawn(model, original, known) -> None:
    before = original.clone()
    completion = complete_top(Sampler(model, 2), original, known, 4)
    assert int(completion.kept.sum()) == known
    assert completion.values.shape == (4, 64)
    assert completion.values.dtype == torch.int64
    assert (completion.values[:, :known] == original[:known]).all()
    assert torch.equal(original, before)
    assert completion.values.min() >= 0
    assert completion.values.max() < 16
    if known < 60:
        assert len(torch.unique(completion.values, dim=0)) == 4


@torch.no_grad()
def complete_by_steps(model: PixelModel, original: torch.Tensor, known: int, count: int, seed: int) -> torch.Tensor:
    """Compute the same completions by steps. Every image reads the known values step by step."""
    parameters, state = model.step(model.start_tokens(count), model.init_state(count))
    for value in original[:known]:
        parameters, state = model.step(value.expand(count), state)
    engine = ReferenceEngine(model, count, state)
    return engine.draw_values(parameters, UniformStreams(seed, range(count)), Filters(), 64 - known).long()


@loop_over("known", [0, 1, 24, 63])
def test_reading_the_known_values_in_one_pass_equals_stepping(model, original, known) -> None:
    completion = complete_top(Sampler(model, 2), original, known, 5)
    assert torch.equal(completion.values[:, known:], complete_by_steps(model, original, known, 5, seed=2))


def test_the_known_values_are_read_once_for_all_completions(build_tiny_model, original, monkeypatch) -> None:
    model = build_tiny_model()
    shapes = []
    attend = PixelModel.attend

    def watched(self: PixelModel, tokens: torch.Tensor, state: object = None) -> object:
        shapes.append(tuple(tokens.shape))
        return attend(self, tokens, state)  # type: ignore[arg-type]

    monkeypatch.setattr(PixelModel, "attend", watched)
    complete_top(Sampler(model, engine="reference"), original, 24, 5)
    assert shapes[0] == (1, 25)


@pytest.mark.parametrize("guidance", [1, 2])
@pytest.mark.parametrize("count", [1, 2, 7])
@pytest.mark.parametrize("attention", ["linear", "softmax"])
def test_int8_completions_are_the_same_with_every_instruction_set(
    build_tiny_model, original, instruction_set, monkeypatch, attention, count, guidance
) -> None:
    model = build_tiny_model(attention=attention, classes=3, optional_class=True)
    sampler = Sampler(model, 2, Filters(guidance=guidance), NATIVE, torch.int8)
    completion = complete_top(sampler, original, 24, count, label=1)
    monkeypatch.undo()
    starts = sampler.start_tokens(count, torch.full((count,), 1))
    engine = NativeEngine(model, len(starts), products=torch.int8)
    for tokens in [starts, *original[:24, None].expand(-1, len(starts))]:
        parameters = engine.step(tokens)
    expected = engine.draw_values(parameters, UniformStreams(2, range(count)), sampler.filters, 40)
    assert torch.equal(completion.values[:, 24:], expected.long())


def test_completing_without_known_values_equals_sampling(model, original) -> None:
    completion = complete_top(Sampler(model, 3), original, 0, 5)
    assert torch.equal(completion.values, sample_values(model, range(5), seed=3).values.long())
    assert math.isnan(completion.kept_bits_per_dim)
    assert len(completion.completed_bits_per_dim) == 5


def test_completion_i_depends_only_on_seed_and_i(model, original) -> None:
    many, few, other = (
        complete_top(Sampler(model, seed), original, 24, count).values for count, seed in ((6, 2), (2, 2), (6, 3))
    )
    assert torch.equal(many[:2], few)
    assert not torch.equal(many, other)


def test_completions_do_not_depend_on_the_hidden_part_of_the_original(model, original) -> None:
    changed = original.clone()
    changed[24:] = 15 - changed[24:]
    ours, theirs = (complete_top(Sampler(model, 2), image, 24, 3) for image in (original, changed))
    assert torch.equal(ours.values, theirs.values)
    assert ours.kept_bits_per_dim == pytest.approx(theirs.kept_bits_per_dim, rel=1e-12)
    assert ours.original_rest_bits_per_dim != theirs.original_rest_bits_per_dim
    changed = original.clone()
    changed[23] = (changed[23] + 8) % 16
    assert not torch.equal(complete_top(Sampler(model, 2), changed, 24, 3).values[:, 24:], ours.values[:, 24:])


def test_the_bits_of_each_part_match_the_parallel_likelihood(model, original) -> None:
    known, count = 24, 3
    completion = complete_top(Sampler(model, 2), original, known, count)

    def bits(values: torch.Tensor, start: int, stop: int) -> float:
        logs = model.head.log_probabilities(model.attend(model.shift_values(values.unsqueeze(0)))[0]).detach()[0]
        nats = [-float(logs[position, values[position]]) for position in range(start, stop)]
        return math.fsum(nats) / math.log(2) / len(nats)

    assert completion.kept_bits_per_dim == pytest.approx(bits(original, 0, known), rel=1e-12)
    assert completion.original_rest_bits_per_dim == pytest.approx(bits(original, known, 64), rel=1e-12)
    expected = [bits(values, known, 64) for values in completion.values]
    assert completion.completed_bits_per_dim == pytest.approx(expected, rel=1e-12)
    assert len(set(completion.completed_bits_per_dim)) == count


def test_filters_apply_to_completions(model, original) -> None:
    greedy = complete_top(Sampler(model, 2, Filters(top_k=1)), original, 24, 3).values
    assert len(torch.unique(greedy, dim=0)) == 1
    logs = model.head.log_probabilities(model.attend(model.shift_values(greedy[:1]))[0])[0].detach()
    assert torch.equal(logs.argmax(dim=-1)[24:], greedy[0, 24:])


def test_a_model_that_predicts_nan_is_refused(build_tiny_model, original, raises_one_line) -> None:
    model = build_tiny_model()
    model.head.projection.bias.data[3] = math.nan
    with raises_one_line(LintxError, "not a finite number", "damaged"):
        complete_top(Sampler(model), original, 24, 2)


@pytest.mark.parametrize("known", [0, 40])
def test_the_batch_of_completions_is_halved_if_memory_runs_out(build_tiny_model, monkeypatch, known) -> None:
    model = build_tiny_model(dtype=torch.float64)
    original = sample_values(model, range(1), seed=9).values[0].long()
    expected = complete_top(Sampler(model, 2), original, known, 5)
    step, halved = model.step, []

    def limited(tokens: torch.Tensor, state: object) -> object:
        if len(tokens) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return step(tokens, state)  # type: ignore[arg-type]

    monkeypatch.setattr(model, "step", limited)
    found = complete_top(Sampler(model, 2), original, known, 5, on_halve=halved.append)
    assert halved == [2]
    assert torch.equal(found.values, expected.values)
    assert found.completed_bits_per_dim == pytest.approx(expected.completed_bits_per_dim, abs=1e-12)
    assert found.original_rest_bits_per_dim == pytest.approx(expected.original_rest_bits_per_dim, abs=1e-12)


# Classes


def test_a_completion_has_the_given_class(build_tiny_model) -> None:
    # The result must equal stepping through the start token of the class and the known values.
    model = build_tiny_model(dtype=torch.float64, classes=3)
    original, known = torch.arange(64) % 16, 24
    seen = []
    for label in range(3):
        done = complete_top(Sampler(model, 6), original, known, 2, label=label)
        state = model.init_state(2)
        start = model.start_tokens(2, torch.tensor([label, label]))
        for token in (start, *original[:known].unsqueeze(1).expand(-1, 2)):
            parameters, state = model.step(token, state)
        streams = UniformStreams(6, range(2))
        expected = ReferenceEngine(model, 2, state).draw_values(parameters, streams, Filters(), 64 - known)
        assert torch.equal(done.values[:, known:], expected.long())
        bits = model.nats(original.unsqueeze(0), torch.tensor([label])).detach()[0] / math.log(2)
        assert done.kept_bits_per_dim == pytest.approx(float(bits[:known].mean()))
        assert done.original_rest_bits_per_dim == pytest.approx(float(bits[known:].mean()))
        seen.append(done.values)
    assert not torch.equal(seen[0], seen[1])
