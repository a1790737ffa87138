import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from linformer_cli import files
from linformer_cli.cli.app import main
from linformer_cli.errors import LintxError


@dataclass(frozen=True)
class Outcome:
    code: int
    stdout: str
    stderr: str

    @property
    def document(self) -> Any:
        return json.loads(self.stdout)


Lintx = Callable[..., Outcome]


class NoCapture:
    """Replaces pytest's `capsys`, which only tests can use."""

    def readouterr(self) -> Any:
        return type("Captured", (), {"out": "", "err": ""})


def run_main(arguments: tuple[object, ...], capture: Any) -> Outcome:
    """Run the command line in this process, through the entry point of the installed command."""
    before, sys.argv = sys.argv, ["lintx", *map(str, arguments)]
    try:
        with pytest.raises(SystemExit) as ended:
            main()
    finally:
        sys.argv = before
    captured = capture.readouterr()
    return Outcome(int(ended.value.code or 0), captured.out, captured.err)


@pytest.fixture(autouse=True)
def quick_benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces what takes long in benchmarks and is tested in `tests/bench`.

    The ceilings are made up, and memory is measured in this process, whose growth means nothing.
    """

    def run(work: Callable[..., Any], *arguments: object, limit_seconds: float) -> Any:
        return replace(work(*arguments), bytes=2**20)

    measure = "linformer_cli.bench.measure"
    monkeypatch.setattr(f"{measure}.peak_memory.run_fresh", run)
    monkeypatch.setattr(f"{measure}.ceilings.time_samples", lambda work, device, repeats: (1.0,) * repeats)
    monkeypatch.setattr(f"{measure}.ceilings.COPY_BYTES", 1)


@pytest.fixture
def without_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Benchmarks do not compare the parallel and the step form of a mechanism, which takes longer than timing it."""
    for module in ("attention", "copy", "models"):
        monkeypatch.setattr(f"linformer_cli.bench.{module}.require_agreement", lambda model: None)


@pytest.fixture
def lintx(capsys: pytest.CaptureFixture[str]) -> Lintx:
    return lambda *arguments: run_main(arguments, capsys)


@pytest.fixture
def raw_lintx(capsysbinary: pytest.CaptureFixture[bytes]) -> Lintx:
    """Like `lintx`, but the outputs are bytes."""
    return lambda *arguments: run_main(arguments, capsysbinary)


@pytest.fixture
def full_disk(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets `write_file` fail, after the files of `run_folder` have been written."""

    def refuse(path: Path, **settings: Any) -> None:
        raise LintxError(f"cannot write {path}: no space left on device")

    monkeypatch.setattr(files, "open_atomically", refuse)


@pytest.fixture(scope="session")
def labelled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Arrays of images of three classes, for `--data array:FOLDER`."""
    folder = tmp_path_factory.mktemp("labelled")
    images = np.random.default_rng(0).integers(0, 256, (30, 6, 6), dtype=np.uint8)
    for part, labels in (("train", np.arange(30) % 3), ("test", np.arange(30) % 2)):
        np.save(folder / f"{part}-images.npy", images)
        np.save(folder / f"{part}-labels.npy", labels)
    return folder


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of a few steps with a tiny model on 10 x 10 glyphs."""
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    options = ("--data", "glyphs", "--image-size", 10, "--preset", "tiny", "--steps", 6, "--batch", 4)
    assert run_main(("train", *options, "--out", folder), NoCapture()).code == 0
    return folder
