import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from linformer_cli.cli.app import main


@dataclass(frozen=True)
class Outcome:
    code: int
    stdout: str
    stderr: str

    @property
    def document(self) -> Any:
        return json.loads(self.stdout)


Lintx = Callable[..., Outcome]


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


@pytest.fixture
def lintx(capsys: pytest.CaptureFixture[str]) -> Lintx:
    return lambda *arguments: run_main(arguments, capsys)


@pytest.fixture
def raw_lintx(capsysbinary: pytest.CaptureFixture[bytes]) -> Lintx:
    """Like `lintx`, but the outputs are bytes."""
    return lambda *arguments: run_main(arguments, capsysbinary)


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of a few steps with a tiny model on 10 x 10 glyphs."""
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    arguments = ["train", "--data", "glyphs", "--image-size", "10", "--preset", "tiny", "--steps", "6", "--batch", "4"]
    before, sys.argv = sys.argv, ["lintx", *arguments, "--out", str(folder)]
    try:
        with pytest.raises(SystemExit) as ended:
            main()
    finally:
        sys.argv = before
    assert not ended.value.code
    return folder
