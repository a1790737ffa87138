"""Tests of the copy task: sequences, models, and curves that stay comparable if a benchmark ends early."""

import math
import signal
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from loops import loop_over

from linformer_cli.attention.linear import LinearAttention
from linformer_cli.bench import copy
from linformer_cli.bench.copy import CopyReport, CopyRun, run_copy_task
from linformer_cli.bench.sequence_tasks import (
    SEPARATOR,
    SYMBOLS,
    CopyModel,
    CopySettings,
    RecallSettings,
    choose_size,
    draw_batch,
)
from linformer_cli.errors import DisagreementError, TrainingError, UsageError
from linformer_cli.evaluation.agreement import require_agreement
from linformer_cli.model.mixers import Variant, list_variants, parse_variants
from linformer_cli.system.signals import StopRequest

VARIANTS = parse_variants(["softmax", "linear:chunk=4"])


@pytest.fixture(autouse=True)
def without_comparison(monkeypatch) -> None:
    """Attend and step are not compared, which would take longer than the training."""
    monkeypatch.setattr(copy, "require_agreement", lambda model: None)


@pytest.mark.parametrize("length", [8, 32, 33])
def test_a_sequence_contains_a_string_twice(length) -> None:
    sequences, copied = draw_batch(CopySettings(length, 16, seed=3), 5, batch=200)
    counts = set()
    for sequence, mask in zip(sequences.tolist(), copied.tolist(), strict=True):
        count = sequence.index(SEPARATOR)
        counts.add(count)
        first, second, rest = sequence[:count], sequence[count + 1 : 2 * count + 1], sequence[2 * count + 1 :]
        assert first == second and SEPARATOR not in first and len(second) == count
        assert set(rest) <= {SEPARATOR}
        assert [place for place, marked in enumerate(mask) if marked] == list(range(count + 1, 2 * count + 1))
    assert counts == set(range(length // 4, (length - 1) // 2))
    assert set(sequences.unique().tolist()) == {SEPARATOR, *range(1, SYMBOLS + 1)}


def test_every_update_and_every_seed_has_different_sequences() -> None:
    drawn = [draw_batch(CopySettings(16, 16, seed=seed), update)[0] for seed, update in ((0, 0), (0, 1), (1, 0))]
    assert torch.equal(drawn[0], draw_batch(CopySettings(16, 16), 0)[0])
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert not torch.equal(drawn[one], drawn[other])


@loop_over("variant", list_variants(baselines=True))
def test_every_mechanism_works_in_the_model_and_sees_only_the_past(variant) -> None:
    torch.manual_seed(0)
    model = CopyModel(variant, CopySettings(13, 32)).eval()
    sequences, _ = draw_batch(CopySettings(13, 32), 0, batch=3)
    changed = sequences.clone()
    changed[:, 7:] = changed[:, 7:] % SYMBOLS + 1
    with torch.no_grad():
        before, after = model(sequences), model(changed)
    assert before.shape == (3, 13, SYMBOLS + 1)
    torch.testing.assert_close(before[:, :7], after[:, :7])
    assert (before[:, 7:] - after[:, 7:]).abs().max() > 1e-4


def test_the_learning_rate_falls_after_3000_updates(record_rates) -> None:
    run = CopyRun(VARIANTS[0], CopySettings(12, 16))

    def update_at(number: int) -> None:
        run.trainer.progress = replace(run.trainer.progress, step=number)
        run.update()

    rates = record_rates(lambda: [update_at(number) for number in (0, 2_999, 3_000)])
    assert rates == [1e-3, 1e-3, 1e-4]


def test_a_budget_below_one_hour_gives_a_smaller_task_which_is_labelled_as_reduced() -> None:
    assert choose_size(3_599, None, None) == (32, 128) and choose_size(60, 64, None) == (64, 128)
    assert choose_size(3_600, None, None) == choose_size(None, None, None) == (128, 256)
    assert not CopySettings(128, 256).reduced and "reduced" not in CopySettings(128, 256).title
    for length, width in ((127, 256), (128, 248), (32, 128)):
        settings = CopySettings(length, width)
        assert settings.reduced and f"length {length}, width {width} (reduced from length 128" in settings.title


@pytest.mark.parametrize(
    ("kind", "sizes", "part"),
    [
        (CopySettings, (7, 16), "at least 8, found 7"),
        (CopySettings, (8, 20), "found 20"),
        (RecallSettings, (16, 8, 1, 1, 0, "cpu", 5), "at most 4 pairs, found 5"),
    ],
)
def test_impossible_sizes_give_a_one_line_error(kind, sizes, part, raises_one_line) -> None:
    with raises_one_line(UsageError, part):
        kind(*sizes)


def learn(variants: Sequence[Variant] = VARIANTS, updates: int = 6, seed: int = 0, **given: Any) -> CopyReport:
    settings = CopySettings(12, 16, updates, points_every=2, seed=seed)
    return run_copy_task(variants, settings, **given)


def test_a_point_averages_the_updates_since_the_last_point(monkeypatch) -> None:
    """The losses of every model are 1, 2, 3, ..."""
    monkeypatch.setattr(CopyRun, "update", lambda run: (len(run.updates) + 1.0, 0.1 * len(run.updates)))
    told = []
    report = learn(updates=5, report=lambda u, p: told.append((u, set(p))))
    assert report.ended == "finished"
    for row in report.rows:
        assert [(point.update, point.loss) for point in row.points] == [(2, 1.5), (4, 3.5), (5, 4.5)]
        assert row.points[1].accuracy == pytest.approx(0.25)
        assert (row.updates, row.loss, row.failed) == (5, 4.5, None)
    assert told == [(update, {"softmax", "linear-4"}) for update in (2, 4, 5)]


def test_training_is_repeatable_and_independent_of_the_other_mechanisms(monkeypatch) -> None:
    given: list[torch.Tensor] = []
    forward = CopyModel.forward
    monkeypatch.setattr(CopyModel, "forward", lambda self, s: given.append(s) or forward(self, s))

    def losses(variants, seed: int = 0) -> dict[str, list[float]]:
        report = learn(variants, 2, seed)
        return {row.name: [point.loss for point in row.points] for row in report.rows}

    together = losses(VARIANTS)
    assert given[0] is given[1] and given[2] is given[3] and not torch.equal(given[0], given[2])
    assert together == losses(VARIANTS)
    assert losses(VARIANTS[1:])["linear-4"] == together["linear-4"]
    assert losses(VARIANTS, seed=1) != together
    for values in together.values():  # initial predictions are almost uniform
        assert all(abs(value - math.log(SYMBOLS + 1)) < 0.3 for value in values)


def test_the_loss_is_of_the_next_symbol(monkeypatch) -> None:
    run = CopyRun(VARIANTS[0], CopySettings(12, 16))
    sequences, _ = draw_batch(CopySettings(12, 16), 0)
    scale = torch.tensor(50.0, requires_grad=True)
    following = torch.nn.functional.one_hot(sequences.roll(-1, 1), SYMBOLS + 1)
    monkeypatch.setattr(run.trainer.task.model, "forward", lambda given: scale * following)
    loss, accuracy = run.update()
    assert loss < 1e-6 and accuracy == 1


def test_a_model_learns_from_its_updates() -> None:
    """The loss falls within 40 updates. Learning to copy would take longer."""
    report = run_copy_task(VARIANTS[:1], CopySettings(8, 32, updates=40, points_every=10))
    (row,) = report.rows
    assert row.points[-1].loss < row.points[0].loss - 0.02


@pytest.mark.parametrize("failing", [False, True])
@pytest.mark.parametrize("calls", [3, 4])
def test_a_stop_discards_an_unfinished_round_and_its_failures(calls, failing, monkeypatch) -> None:
    stop, made = StopRequest(), []

    def update(run) -> tuple[float, float]:
        made.append(run.variant.label)
        if len(made) == calls:
            stop.signal_number = signal.SIGINT
            if failing and calls == 3:
                raise TrainingError("the loss is NaN")
        return float(len(made)), 0.0

    monkeypatch.setattr(CopyRun, "update", update)
    report = learn(updates=9, stop=stop)
    assert report.ended == "interrupted" and report.settings["updates"] == calls // 2
    assert made == ["softmax", "linear-4"] * (calls // 2) + ["softmax"] * (calls % 2)
    for row in report.rows:
        assert [point.update for point in row.points] == [calls // 2] and row.failed is None


def test_a_budget_that_is_too_small_gives_empty_rows_with_the_bytes_of_a_state() -> None:
    report = learn(budget_seconds=1e-9)
    assert report.ended == "budget"
    for row in report.rows:
        assert (row.points, row.updates, row.loss, row.seconds_per_update) == ((), 0, None, None)
    # The keys and values of 12 positions in 4 layers, 16 numbers each.
    assert report.rows[0].state_bytes == 4 * (12 * 2 * 16 * 4 + 8)


def test_a_nan_loss_ends_the_training_of_one_model_only(monkeypatch) -> None:
    update_model = CopyRun.update

    def update(run) -> tuple[float, float]:
        if run.variant.attention == "linear" and len(run.updates) == 2:
            run.trainer.task.model.head.bias.data.fill_(math.nan)
        return update_model(run)

    monkeypatch.setattr(CopyRun, "update", update)
    whole, broken = learn().rows
    assert "NaN or infinite at step 2 (loss nan" in broken.failed and "batch 3" in broken.failed
    assert [point.update for point in broken.points] == [2]
    assert [point.update for point in whole.points] == [2, 4, 6]
    alone = learn(VARIANTS[1:])
    assert alone.ended == "failed" and alone.rows[0].points == broken.points


def test_nothing_is_trained_if_attend_and_step_disagree(monkeypatch, damage_step, raises_one_line) -> None:
    damage_step(LinearAttention)
    monkeypatch.setattr(copy, "require_agreement", require_agreement)
    with raises_one_line(DisagreementError, "'linear' is not"):
        learn()


# Recall.


def test_every_key_is_asked_for_once_and_its_value_follows() -> None:
    settings = RecallSettings(24, 8, seed=3, pairs=5)
    sequences, recalled = draw_batch(settings, 7, batch=100)
    assert not torch.equal(sequences, draw_batch(settings, 8, batch=100)[0])
    for sequence, mask in zip(sequences.tolist(), recalled.tolist(), strict=True):
        values = dict(zip(sequence[:10:2], sequence[1:10:2], strict=True))
        assert len(values) == len(set(values.values())) == 5
        assert min(values) > 0 and max(values) < settings.symbols / 2 <= min(values.values())
        places = [place for place, marked in enumerate(mask) if marked]
        assert {sequence[place - 1]: sequence[place] for place in places} == values
        known = {*range(10), *places, *(place - 1 for place in places)}
        assert {symbol for place, symbol in enumerate(sequence) if place not in known} == {SEPARATOR}
    first = recalled.int().argmax(dim=1)
    assert {11, 13} <= set(first.tolist()) <= {11, 13, 15, 17}


@pytest.mark.slow
def test_attention_learns_to_recall_and_a_model_without_does_not() -> None:
    settings = RecallSettings(16, 32, updates=800, learning_rate=0.01, pairs=2)
    report = run_copy_task(parse_variants(["linear", "none"], baselines=True), settings)
    found = {row.name: row.accuracy for row in report.rows}
    assert found["linear"] > 0.9 and found["none"] < 0.1
