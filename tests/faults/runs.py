"""Damaged copies of a small run, and commands that read them."""

import hashlib
import json
from pathlib import Path

import pytest
from cli.conftest import Outcome, run_main

from linformer_cli.checkpoint_files import CONFIG, TRAINING, WEIGHTS

DIGESTS = {WEIGHTS: "weights_sha256", TRAINING: "training_sha256"}


def snapshot(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != ".lock"
    }


def use(run: Path, file: str, capsys: pytest.CaptureFixture[str]) -> Outcome:
    """Run a command that reads `file`: `train --resume` for the training state, and otherwise `sample`."""
    if file == TRAINING:
        return run_main(("train", "--resume", run, "--steps", "6"), capsys)
    return run_main(("sample", run / "last", "-n", "1", "-o", run.parent / "out.png"), capsys)


def assert_one_line(outcome: Outcome, *parts: str) -> None:
    assert outcome.code in (1, 2), outcome
    (line,) = (line for line in outcome.stderr.splitlines() if line.startswith("Error: "))
    assert outcome.stderr.endswith(line + "\n")
    assert len(line) < 500
    assert "Traceback" not in outcome.stderr
    for part in parts:
        assert part in line
    assert outcome.stdout == ""


def assert_refused(run: Path, file: str, capsys: pytest.CaptureFixture[str], *parts: str) -> None:
    before = snapshot(run)
    outcome = use(run, file, capsys)
    assert outcome.code == 1, outcome
    assert_one_line(outcome, *parts)
    assert not (run.parent / "out.png").exists()
    assert snapshot(run) == before


def sign(folder: Path, **digests_of: str) -> None:
    """Update the digests to those of the damaged files, so that the checks after the digests are tested too."""
    document = json.loads((folder / CONFIG).read_text())
    document |= {key: hashlib.sha256((folder / file).read_bytes()).hexdigest() for key, file in digests_of.items()}
    document.pop("config_sha256", None)
    (folder / CONFIG).write_text(json.dumps(document))
