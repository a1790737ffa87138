"""bits/dim come from trained runs, and stand beside exactly the model that was trained."""

import pytest

from linformer_cli.bench.trained import UNTRAINED, find_trained, read_trained_runs
from linformer_cli.checkpoint import save_checkpoint
from linformer_cli.errors import CheckpointError


@pytest.fixture
def save_run(tmp_path, build_tiny_model, tiny_info):
    def save(name: str, bits: float | None, **changes):
        model = build_tiny_model(**changes)
        training = tiny_info.training.model_copy(
            update={"validation_bits_per_dim": bits, "validation_standard_error": 0.1, "validation_images": 9}
        )
        save_checkpoint(
            tmp_path / name, model, tiny_info.model_copy(update={"model": model.config, "training": training})
        )
        return str(tmp_path / name)

    return save


def test_a_run_says_what_it_reached(save_run) -> None:
    (run,) = read_trained_runs([save_run("one", 1.5)])
    assert run.record.keys() == UNTRAINED.keys()
    assert (run.record["bits_per_dim"], run.record["images_seen"], run.record["data"]) == (1.5, 48, "glyphs")
    assert set(UNTRAINED.values()) == {None}


def test_the_best_run_of_the_same_model_counts(save_run, build_tiny_model) -> None:
    runs = read_trained_runs([save_run("one", 1.5), save_run("two", 1.2), save_run("wide", 1.0, feed_forward=64)])
    found = find_trained(runs, build_tiny_model().config)
    assert found is not None and found.path.name == "two"
    assert find_trained(runs, build_tiny_model(attention="softmax").config) is None
    # Options that were not written are their defaults, and dropout is no part of the model that samples.
    given = build_tiny_model(attention_options={"chunk": 16, "feature_map": "elu"}, dropout=0.5).config
    assert find_trained(runs, given) is found
    assert find_trained(runs, build_tiny_model(attention_options={"chunk": 32}).config) is None
    assert find_trained([], given) is None


def test_a_run_without_validation_is_one_line(save_run, raises_one_line) -> None:
    with raises_one_line(CheckpointError, "no bits/dim", "never validated"):
        read_trained_runs([save_run("none", None)])
