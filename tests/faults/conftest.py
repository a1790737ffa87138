"""Fixtures for the tests of faults: kills, damaged files, full disks and foreign files.

`LINTX_FULL=1 python -m pytest -m '' tests/faults -rP` runs the full number of cases, which takes hours. With
`LINTX_FULL=0.1`, it runs a tenth of them.
"""

import itertools
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from cli.conftest import NoCapture, run_main

SETTINGS = """
[train]
batch = 4
learning_rate = 1e-2
log_every = 3
evaluate_every = 20
evaluate_images = 8
sample_every = 60
sample_images = 2
precision = "fp32"
"""


@pytest.fixture(scope="session")
def small_run_options(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Options of `lintx train` for a run with steps of a few milliseconds, on 40 images of 6 x 6."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "settings.toml").write_text(SETTINGS)
    images = np.random.default_rng(0).integers(0, 256, (40, 6, 6, 1), dtype=np.uint8)
    (folder / "images").mkdir()
    for split in ("train", "validation", "test"):
        np.save(folder / "images" / f"{split}-images.npy", images)
    return ["--data", f"array:{folder / 'images'}", "--preset", "tiny", "--config", str(folder / "settings.toml")]


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory, small_run_options: list[str]) -> Path:
    """A run of four steps. Tests copy and damage it."""
    folder = tmp_path_factory.mktemp("damage") / "run"
    assert run_main(("train", *small_run_options, "--steps", "4", "--out", folder), NoCapture()).code == 0
    return folder


@pytest.fixture
def new_copy(finished_run: Path, tmp_path: Path) -> Callable[[], Path]:
    """Provides `new_copy()`, another copy of the finished run, for tests that loop."""
    numbers = itertools.count()
    return lambda: Path(shutil.copytree(finished_run, tmp_path / str(next(numbers)) / "run"))


@pytest.fixture
def copy(new_copy: Callable[[], Path]) -> Path:
    return new_copy()
