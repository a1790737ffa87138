"""Tests of what commands print, with and without --quiet, and on a terminal."""

import io
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from commands import run_command
from rich.console import Console

from linformer_cli.cli import output


@pytest.fixture(autouse=True)
def talking() -> Iterator[None]:
    output.set_quiet(False)
    yield
    output.set_quiet(False)


@pytest.mark.parametrize("quiet", [False, True])
def test_quiet_drops_messages_and_keeps_warnings(capsys, quiet) -> None:
    output.set_quiet(quiet)
    output.info("wrote a file")
    output.warn("it broke")
    output.warn_smaller_batch(3)
    said = capsys.readouterr()
    warnings = "it broke\nout of memory; continuing with a batch of 3\n"
    assert (said.out, said.err) == ("", warnings if quiet else "wrote a file\n" + warnings)


@pytest.mark.parametrize(
    ("terminal", "quiet", "shown"), [(True, False, True), (True, True, False), (False, False, False)]
)
def test_a_preview_is_shown_only_on_a_terminal_and_without_quiet(monkeypatch, terminal, quiet, shown) -> None:
    written = io.StringIO()
    monkeypatch.setattr(output, "Console", lambda stderr: Console(file=written, force_terminal=terminal, width=40))
    output.set_quiet(quiet)
    output.show_preview(np.zeros((1, 4, 4, 1), np.uint8))
    assert ("▀" in written.getvalue()) == shown
    assert shown or not written.getvalue()


def test_messages_of_a_process_without_stderr_do_not_reach_stdout(monkeypatch, capsys) -> None:
    monkeypatch.setattr("sys.stderr", None)
    output.warn("it broke")
    assert capsys.readouterr().out == ""


def test_messages_that_cannot_be_written_are_dropped(monkeypatch) -> None:
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr("sys.stderr", closed)
    output.info("wrote a file")
    output.warn("it broke")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_training_continues_if_stderr_is_full(tmp_path) -> None:
    """The exit code must also be 0, although Python flushes stderr once more at exit."""
    arguments = ["train", "--data", "glyphs", "--image-size", "8", "--preset", "tiny", "--steps", "2", "--batch", "2"]
    code, result, _ = run_command(*arguments, "--out", tmp_path / "run", "--json", stderr="/dev/full")
    assert code == 0
    assert json.loads(result)["steps"] == 2
