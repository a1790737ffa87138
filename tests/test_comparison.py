"""Tests of comparisons: all mechanisms have equal conditions, results are kept in files, and no work is repeated."""

import dataclasses
import json
import math
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from training_runs import Watcher

from linformer_cli.attention.linear import LinearAttention
from linformer_cli.comparison import figures, results
from linformer_cli.comparison.entries import (
    Conditions,
    Entry,
    Plan,
    choose_training,
    count_parameters,
    draw_samples,
    match_parameters,
    plan_entries,
    train_entry,
)
from linformer_cli.comparison.figures import (
    TIMED_STEPS,
    find_groups,
    forget_speeds,
    measure_bits,
    read_figures,
    read_runs,
    sampling_speed,
    time_sampling_once,
    time_training_once,
    training_speed,
)
from linformer_cli.comparison.results import ComparisonRow, describe_entry
from linformer_cli.data.glyphs import draw_glyphs
from linformer_cli.data.images import ImageSet
from linformer_cli.errors import DisagreementError, Interrupted, LintxError, UsageError
from linformer_cli.metrics import read_metrics
from linformer_cli.model.mixers import list_mixers, parse_variants
from linformer_cli.model.pixel_model import PixelModel
from linformer_cli.presets import PRESETS
from linformer_cli.report.grids import read_png_metadata
from linformer_cli.sampling.decode import WholeImages
from linformer_cli.system.signals import StopRequest
from linformer_cli.training.learner import Learner

IMAGES, BATCH = 21, 4
DATA = {"name": "glyphs", "image_size": 8}
SETS = tuple(
    ImageSet("glyphs", split, *draw_glyphs("train", 8, start, start + 12))  # type: ignore[arg-type]
    for split, start in (("train", 0), ("validation", 100))
)
CPU = Conditions("cpu", "fp32", batch=8, repeats=1)
SMALL_BATCH = dataclasses.replace(CPU, batch=3)


def test_options_override_the_file_and_the_file_overrides_the_defaults(tmp_path: Path) -> None:
    said: list[str] = []
    file = tmp_path / "all.toml"
    file.write_text('[train]\nseed = 3\nprecision = "fp32"\nevaluate_images = 7\n')
    chosen = choose_training(file, {"evaluate_images": 9}, said.append)
    assert (chosen.seed, chosen.precision, chosen.evaluate_images) == (3, "fp32", 9)
    assert choose_training(file, {}, said.append).evaluate_images == 7
    bare = choose_training(None, {}, said.append)
    assert (bare.evaluate_images, bare.precision, bare.seed, bare.device) == (2_000, "auto", 0, "auto")
    assert said == []
    for line in ("steps = 9", "epochs = 1.0", "max_time = 60.0", "evaluate_every = 3", "sample_every = 3"):
        file.write_text(f"[train]\nseed = 4\n{line}\n")
        assert choose_training(file, {}, said.append).seed == 4
        assert "all.toml" in said[-1] and line.partition(" ")[0] in said[-1] and "--images" in said[-1]
    assert len(said) == 5
    file.write_text('[init_from]\ncheckpoint = "a"\n[[distill_from]]\ncheckpoint = "b"\n')
    choose_training(file, {}, said.append)
    assert "all.toml': ignored init_from, distill_from" in said[-1]


def plan(
    runs: Path,
    *entries: str,
    images: int | None = IMAGES,
    max_time: float | None = None,
    match: bool = False,
    **train: Any,
) -> list[Entry]:
    variants = parse_variants(entries or ["linear", "softmax", "fine=linear:chunk=16"], baselines=True)
    settings = {"batch": BATCH, "log_every": 2, "precision": "fp32", **train}
    wanted = Plan(runs, images, max_time, match, None, "tiny", DATA, settings)
    return plan_entries(variants, wanted, lambda _settings: SETS)[0]


def work(entry: Entry, stop: StopRequest | None = None) -> None:
    train_entry(entry, SETS, CPU, Watcher(), stop or StopRequest())


def describe(entry: Entry, failure: str | None = None) -> ComparisonRow:
    return describe_entry(entry, CPU, {} if failure is None else {entry.variant.label: failure})


def time_training(entry: Entry, repeats: int = 1) -> bool:
    return time_training_once(entry, SETS, dataclasses.replace(CPU, repeats=repeats))


def time_sampling(entry: Entry, repeats: int = 1) -> bool:
    return time_sampling_once(entry, dataclasses.replace(SMALL_BATCH, repeats=repeats))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one finished run. Tests share the folder and must not change it."""
    runs = tmp_path_factory.mktemp("comparison")
    work(plan(runs, "linear")[0])
    return runs


@pytest.fixture
def finished(trained: Path, tmp_path: Path) -> Entry:
    shutil.copytree(trained, tmp_path / "runs")
    return plan(tmp_path / "runs", "linear")[0]


# The plan


def test_all_runs_differ_only_in_the_mechanism_and_images_are_loaded_once(tmp_path) -> None:
    loads = []
    names, data = ["linear", "softmax", "fine=linear:chunk=16"], {"preset": "tiny", "data": DATA}
    wanted = Plan(tmp_path, IMAGES, **data, train={"batch": BATCH})
    entries, images = plan_entries(parse_variants(names), wanted, lambda settings: loads.append(settings) or SETS)
    assert len(loads) == 1 and loads[0].data.name == "glyphs" and images == SETS
    assert [entry.folder.path.name for entry in entries] == ["linear", "softmax", "fine"]
    for entry in entries:
        assert entry.config.train == entries[0].config.train
        assert entry.config.data == entries[0].config.data
        same = {"attention", "attention_options"}
        assert entry.config.model.model_dump(exclude=same) == entries[0].config.model.model_dump(exclude=same)
    assert [entry.config.model.attention for entry in entries] == ["linear", "softmax", "linear"]
    assert entries[2].config.model.attention_options["chunk"] == 16
    # There are 21 images in batches of 4, and one validation at the end.
    assert (entries[0].config.train.steps, entries[0].config.train.evaluate_every) == (6, 6)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UsageError, match="nothing to compare"):
        plan_entries([], wanted, lambda settings: SETS)


def test_matched_models_have_as_many_parameters_as_the_first(tmp_path, raises_one_line) -> None:
    names = ["linear", *list_mixers()]
    entries = plan(tmp_path, *(f"{index}={name}" for index, name in enumerate(names)), match=True)
    assert entries[0].config.model.feed_forward == PRESETS["tiny"].feed_forward
    count = PixelModel(entries[0].config.model).parameter_count()
    for name, entry in zip(names, entries, strict=True):
        assert PixelModel(entry.config.model).parameter_count() == pytest.approx(count, rel=0.03), name
    # A boom layer has whole chunks of the model's width of 32. The difference is less than half a chunk.
    model = entries[0].config.model.model_copy(update={"feed_forward_kind": "boom"})
    small, large = (model.model_copy(update={"feed_forward": width}) for width in (64, 320))
    assert match_parameters(large, count_parameters(small) + 600).feed_forward == 64
    # Without a feed-forward network, the large model still has too many parameters.
    with raises_one_line(UsageError, "'gau' cannot have", "the closest is"):
        plan(tmp_path, "linear", "gau:z_width=4000", match=True)


def test_a_run_that_was_killed_or_stopped_continues_to_its_end(tmp_path) -> None:
    (entry,) = plan(tmp_path, "linear")
    entry.folder.create(entry.config)
    entry.folder.metrics_file.unlink()  # killed between its first two files
    assert entry.saved is None and entry.finished is None
    for use in (lambda entry: draw_samples(entry, "cpu"), time_sampling, time_training):
        with pytest.raises(LintxError, match="is not finished"):
            use(entry)
    with pytest.raises(Interrupted):
        work(entry, StopRequest(int(signal.SIGINT)))
    assert entry.saved is not None and entry.finished is None and describe(entry).missing == "step 0 of 6"
    work(entry)
    assert entry.finished is not None and entry.finished.info.training.step == 6
    rows = read_metrics(entry.folder.metrics_file)
    assert [row["step"] for row in rows] == ["2", "4", "6", "6"]
    work(entry)
    assert read_metrics(entry.folder.metrics_file) == rows


def test_a_run_with_other_settings_is_refused(finished, raises_one_line) -> None:
    runs = finished.folder.path.parent
    plan(runs, "linear", device="cpu")
    for changes, part in (
        ({"images": 2 * IMAGES}, "train.steps = 6, not 11"),
        ({"seed": 3}, "train.seed = 0, not 3"),
    ):
        with raises_one_line(UsageError, part, "--runs"):
            plan(runs, "linear", **changes)
    with raises_one_line(UsageError, "model.attention_options"):
        plan(runs, "linear=linear:chunk=16")


def test_runs_of_equal_time_are_finished_when_the_time_is_over(tmp_path) -> None:
    entry = plan(tmp_path, "linear", images=None, max_time=0.5)[0]
    assert (entry.config.train.steps, entry.config.train.max_time) == (None, 0.5)
    with pytest.raises(Interrupted):
        work(entry, StopRequest(int(signal.SIGINT)))
    assert entry.finished is None and describe(entry).missing.endswith("of 0.5 s")
    work(entry)
    assert entry.finished is not None and entry.finished.info.training.elapsed_seconds >= 0.5
    assert describe(entry).bits_per_dim is not None


# Samples


def test_a_grid_is_drawn_once_per_checkpoint(finished) -> None:
    assert draw_samples(finished, "cpu")
    digest = finished.finished.digest
    assert read_png_metadata(finished.samples_file)["checkpoint_sha256"] == digest
    assert finished.samples_file.parent == finished.folder.path.parent
    assert not draw_samples(finished, "cpu")
    finished.samples_file.write_bytes(b"something else")
    with pytest.raises(Interrupted):
        draw_samples(finished, "cpu", StopRequest(signal.SIGINT).raise_if_set)
    assert finished.samples_file.read_bytes() == b"something else"
    assert draw_samples(finished, "cpu")


# Speed


def test_repeats_of_other_images_are_kept_until_there_are_enough(finished, monkeypatch) -> None:
    firsts = []
    time_sample = WholeImages.time_sample
    monkeypatch.setattr(WholeImages, "time_sample", lambda work: firsts.append(work.drawn) or time_sample(work))
    speed = sampling_speed(finished.finished, SMALL_BATCH)
    assert [time_sampling(finished, 2) for _ in range(3)] == [True, True, False]
    samples = read_figures(finished.sampling_file, speed)
    assert len(samples) == 2 and min(samples) > 0
    assert time_sampling(finished, 3)
    assert read_figures(finished.sampling_file, speed)[:2] == samples
    assert firsts == [0, SMALL_BATCH.batch, 2 * SMALL_BATCH.batch]
    assert [time_training(finished, 2) for _ in range(3)] == [True, True, False]
    for _ in range(2):
        forget_speeds(finished)
    assert read_figures(finished.training_file, training_speed(finished, CPU)) == [] and time_sampling(finished)


def test_times_measured_under_other_conditions_are_not_used(finished, monkeypatch) -> None:
    speed = sampling_speed(finished.finished, SMALL_BATCH)
    time_sampling(finished)
    assert len(read_figures(finished.sampling_file, speed)) == 1
    assert {"batch", "device", "threads", "precision", "weights_sha256", "processor", "torch", "kernels"} == set(speed)
    for key in speed:
        assert read_figures(finished.sampling_file, {**speed, key: "another"}) == []
    monkeypatch.setattr(figures, "processor_name", lambda: "another")
    assert read_figures(finished.sampling_file, sampling_speed(finished.finished, SMALL_BATCH)) == []
    record = json.loads(finished.sampling_file.read_text())
    wrong = [["x"], [0.0], [-1.0], [1e-320], [True], ["1"], [float("nan")], [float("inf")], {"0": 1.0}]
    texts = [json.dumps({**record, "samples_seconds": seconds}) for seconds in wrong]
    for text in ("[1", "[]", "[" * 100_000, json.dumps({"samples_seconds": [1.0]}), *texts):
        finished.sampling_file.write_text(text)
        assert read_figures(finished.sampling_file, speed) == []


def test_timing_uses_the_settings_of_the_run_and_does_not_change_it(finished, monkeypatch) -> None:
    taken = []
    right = Learner.train_step
    monkeypatch.setattr(Learner, "train_step", lambda self: taken.append(self.task.config) or right(self))
    before = {path: path.read_bytes() for path in finished.folder.path.rglob("*") if path.is_file()}
    time_training(finished)
    assert taken == [finished.config] * (1 + TIMED_STEPS)
    after = {path: path.read_bytes() for path in finished.folder.path.rglob("*") if path.is_file()}
    assert after.pop(finished.training_file) and after == before
    record = json.loads(finished.training_file.read_text())
    assert (record["batch"], record["steps"], record["precision"]) == (BATCH, TIMED_STEPS, "fp32")


def test_nothing_is_timed_if_attend_and_step_disagree(finished, monkeypatch, raises_one_line) -> None:
    right = LinearAttention.step
    monkeypatch.setattr(LinearAttention, "step", lambda self, q, k, v, *rest: right(self, q, k, v * 1.01, *rest))
    for use in (lambda entry: draw_samples(entry, "cpu"), time_sampling, time_training):
        with raises_one_line(DisagreementError, "'linear' is not timed"):
            use(finished)
    assert not finished.sampling_file.exists() and not finished.training_file.exists()


# Bits of images


def test_bits_are_kept_for_the_weights_that_gave_them(finished) -> None:
    assert read_runs([finished]) == {}
    measure_bits(finished, SETS[1], "cpu")
    (bits,) = read_runs([finished])["linear"]
    training = finished.finished.info.training
    assert len(bits) == 12 and float(bits.mean()) == pytest.approx(training.validation_bits_per_dim, rel=1e-6)
    record = json.loads(finished.bits_file.read_text())
    finished.bits_file.write_text(json.dumps(record | {"bits_per_dim": [1.0] * 12}))
    measure_bits(finished, SETS[1], "cpu")  # not again
    assert read_runs([finished])["linear"].tolist() == [[1.0] * 12]
    for change in ({"weights_sha256": "0"}, {"images": 11}, {"bits_per_dim": [math.nan] * 12}):
        finished.bits_file.write_text(json.dumps(record | change))
        assert read_runs([finished]) == {}


def test_a_group_has_those_that_differ_by_at_most_two_errors_from_its_best() -> None:
    images = torch.linspace(0, 50, 8).expand(2, 8)
    wave = torch.tensor([0.1, -0.1] * 4)
    # Over eight images, the error of a wave is 0.038.
    bits = {"worse": images + wave + 0.1, "noisy": images + wave + 0.06, "best": images, "same": images + 0.13}
    assert find_groups(bits) == {"best": 1, "noisy": 1, "worse": 2, "same": 2}
    seeds = torch.tensor([[-0.5], [0.6]])
    assert find_groups({"best": images, "seeds": images + seeds}) == {"best": 1, "seeds": 1}


# Rows


def test_a_row_has_quality_speed_and_state_bytes(finished, monkeypatch) -> None:
    monkeypatch.setattr(results, "read_figures", lambda *_arguments: [1.0, 2.0, 4.0])
    draw_samples(finished, "cpu")
    row = describe(finished)
    training = finished.finished.info.training
    assert (row.bits_per_dim, row.standard_error) == (
        training.validation_bits_per_dim,
        training.validation_standard_error,
    )
    assert (row.steps, row.images, row.validation_images) == (6, 24, 12)
    assert row.bits_per_dim == pytest.approx(8, abs=0.3)
    # The state has at least s and z of 2 layers with 2 heads of width 16.
    assert row.state_bytes_per_image > 2 * 2 * 16 * 17 * 4
    assert (row.images_per_second, row.images_per_second_quartiles) == (4, pytest.approx([8 / 3, 16 / 3]))
    images = TIMED_STEPS * BATCH
    assert row.training_images_per_second == images / 2
    assert row.training_images_per_second_quartiles == pytest.approx([images / 3, images / 1.5])
    assert row.missing is None and row.samples == finished.samples_file


def test_a_row_says_what_is_missing(finished) -> None:
    row = describe(finished)
    assert row.missing == "training and sampling not timed" and row.images_per_second is None
    assert row.parameters > 0
    assert describe(finished, "it broke").missing == "it broke"
    time_training(finished)
    row = describe(finished)
    assert row.missing == "sampling not timed" and row.training_images_per_second > 0
    other = dataclasses.replace(finished, folder=plan(finished.folder.path.parent, "softmax")[0].folder)
    row = describe(other, "it broke")
    assert row.missing == "not begun: it broke"
    assert row.bits_per_dim is row.parameters is row.training_images_per_second is None
