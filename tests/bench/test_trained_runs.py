"""Tests that a row has the bits/dim of a trained run with exactly the same model."""

import pytest
import torch

from linformer_cli.bench.models import BenchModel, find_trained, load_models, read_trained_runs
from linformer_cli.bench.rows import Quality
from linformer_cli.checkpoint import save_checkpoint
from linformer_cli.errors import CheckpointError


@pytest.fixture
def save_run(tmp_path, build_tiny_model, tiny_info):
    def save(name: str, bits: float | None, **changes):
        """Save a checkpoint at `name` in the test's folder."""
        model = build_tiny_model(**changes)
        training = tiny_info.training.model_copy(
            update={"validation_bits_per_dim": bits, "validation_standard_error": 0.1, "validation_images": 9}
        )
        save_checkpoint(
            tmp_path / name, model, tiny_info.model_copy(update={"model": model.config, "training": training})
        )
        return str(tmp_path / name)

    return save


def test_a_run_is_read_with_its_bits_per_dim_images_and_data(save_run, raises_one_line) -> None:
    (run,) = read_trained_runs([save_run("one", 1.5)])
    assert (run.quality.bits_per_dim, run.quality.images_seen, run.quality.data) == (1.5, 48, "glyphs")
    assert set(vars(Quality()).values()) == {None}
    with raises_one_line(CheckpointError, "no bits/dim", "never validated"):
        read_trained_runs([save_run("none", None)])


def test_the_best_run_of_the_same_model_counts(save_run, build_tiny_model) -> None:
    runs = read_trained_runs([save_run("one", 1.5), save_run("two", 1.2), save_run("wide", 1.0, feed_forward=64)])
    found = find_trained(runs, build_tiny_model().config)
    assert found is not None and found.path.name == "two"
    assert find_trained(runs, build_tiny_model(attention="softmax").config) is None
    # Missing options have their defaults. Dropout is not used in sampling and is not compared.
    given = build_tiny_model(attention_options={"chunk": 16, "feature_map": "elu"}, dropout=0.5).config
    assert find_trained(runs, given) is found
    assert find_trained(runs, build_tiny_model(attention_options={"chunk": 32}).config) is None
    assert find_trained([], given) is None


def test_a_folder_stands_for_all_its_validated_runs(save_run, tmp_path, raises_one_line) -> None:
    for name, bits in (("runs/b/last", 1.5), ("runs/b/best", 1.4), ("runs/a/last", 1.2), ("runs/new/last", None)):
        save_run(name, bits)
    (tmp_path / "runs" / "empty").mkdir()
    (tmp_path / "runs" / "a.png").write_bytes(b"")
    runs = read_trained_runs([str(tmp_path / "runs")])
    assert [(run.folder.name, run.quality.bits_per_dim) for run in runs] == [("a", 1.2), ("b", 1.4)]
    assert [run.path.name for run in runs] == ["last", "best"]
    # A run also contains folders, but these are checkpoints and not runs.
    assert [run.quality.bits_per_dim for run in read_trained_runs([str(tmp_path / "runs" / "b")])] == [1.4]
    with raises_one_line(CheckpointError, "holds no checkpoint"):
        read_trained_runs([str(tmp_path / "runs" / "empty")])


def test_a_timed_run_has_its_own_bits_per_dim(save_run) -> None:
    """The bits/dim are those of the run, even if another run of the same model is better."""
    runs = read_trained_runs([save_run("one", 1.5), save_run("two", 1.2)])
    first, second = load_models(runs, "cpu", "bf16")
    assert (first.name, second.name, first.trained, first.preset) == ("one", "two", True, None)
    assert first.model.dtype == torch.bfloat16 and not first.model.training
    assert [timed.find_quality(runs).bits_per_dim for timed in (first, second)] == [1.5, 1.2]
    other = BenchModel("other", first.model)
    assert other.find_quality(runs).bits_per_dim == 1.2 and other.find_quality([]) == Quality()
