"""Fixtures for settings of short runs, and for uninterrupted runs to compare with."""

from collections.abc import Callable
from typing import Any

import pytest
from training_runs import EVALUATE_EVERY, LOG_EVERY, SAVE_EVERY, STEPS, begin, record_order, train

from linformer_cli.config import DataConfig, ModelConfig, RunConfig, TrainConfig
from linformer_cli.training.run_folder import RunFolder


@pytest.fixture(scope="session")
def configure(tiny_model_config: ModelConfig) -> Callable[..., RunConfig]:
    def build(**train: Any) -> RunConfig:
        changes = {"dropout": train.pop("dropout", 0.1), "layers": 1, **train.pop("model", {})}
        model = tiny_model_config.model_copy(update=changes)
        settings = {
            "steps": STEPS,
            "batch": 4,
            "learning_rate": 1e-2,
            "warmup_steps": 2,
            "log_every": LOG_EVERY,
            "evaluate_every": EVALUATE_EVERY,
            "save_every": SAVE_EVERY,
            "sample_every": EVALUATE_EVERY,
            "sample_images": 2,
            **train,
        }
        if "steps" not in train and ("max_time" in train or "epochs" in train):
            del settings["steps"]
        return RunConfig(model=model, data=DataConfig(name="glyphs"), train=TrainConfig(**settings))

    return build


@pytest.fixture(scope="session")
def uninterrupted(configure, tmp_path_factory) -> Callable[..., tuple[RunFolder, list[list[int]]]]:
    """Provides an uninterrupted run and the order of its images. Tests with the same settings share one run."""
    kept: dict[str, tuple[RunFolder, list[list[int]]]] = {}

    def run(settings: dict[str, Any], precision: str) -> tuple[RunFolder, list[list[int]]]:
        key = f"{settings} {precision}"
        if key not in kept:
            trainer = begin(configure(**settings), tmp_path_factory.mktemp("runs") / "whole", precision)
            with pytest.MonkeyPatch.context() as monkeypatch:
                order = record_order(trainer, monkeypatch)
                train(trainer)
            kept[key] = trainer.folder, order
        return kept[key]

    return run
