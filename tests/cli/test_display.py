"""Tests of the progress display and of messages.

The display is one live line on a terminal, and otherwise a new line every few seconds.
"""

import errno
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from commands import run_command
from loops import loop_over
from rich.console import Console

from linformer_cli.cli import output
from linformer_cli.cli.display import TrainingDisplay
from linformer_cli.metrics import MetricsRow

ROW = MetricsRow(
    step=12345,
    images=99,
    elapsed_seconds=1.5,
    train_bits_per_dim=1.23456,
    images_per_second=1234.5,
    peak_memory_bytes=3 << 30,
)


@pytest.fixture(autouse=True)
def talking() -> Iterator[None]:
    output.set_quiet(False)
    yield
    output.set_quiet(False)


def show(width: int, terminal: bool = True, steps: int = 1) -> str:
    """Return what was printed, without cursor movements."""
    console = Console(file=io.StringIO(), force_terminal=terminal, width=width, color_system=None)
    with TrainingDisplay(console) as display:
        for step in range(steps):
            display.on_step(ROW, 0.5 + step / 1000)
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", console.file.getvalue())  # type: ignore[attr-defined]


@pytest.mark.parametrize("width", [30, 40, 60, 80, 120])
def test_the_live_line_fits_the_terminal_and_drops_the_least_important_facts(width: int) -> None:
    last = re.split(r"[\r\n]+", show(width).rstrip())[-1].rstrip()
    assert len(last) <= width and "…" not in last
    assert "100% step 12345" in last
    facts = ["1.235 bits/dim", "? left", "1234.5 images/s", "3 GiB"]
    shown = [fact in last for fact in facts]
    assert shown == sorted(shown, reverse=True), "a less important fact is shown instead of a more important one"
    assert all(shown) == (width >= 80)
    assert ("━" in last) == (width >= 100)


def test_without_a_terminal_a_line_is_printed_every_few_seconds() -> None:
    assert show(40, terminal=False, steps=5) == (" 50%  step 12345  1.235 bits/dim  ? left  1234.5 images/s  3 GiB\n")


def test_the_time_left_depends_on_the_speed_of_this_process_only(monkeypatch) -> None:
    now = 0.0
    monkeypatch.setattr("linformer_cli.cli.display.time.monotonic", lambda: now)
    console = Console(file=io.StringIO(), force_terminal=False, width=200, color_system=None)
    with TrainingDisplay(console) as display:
        for now, share in ((0.0, 0.5), (60.0, 0.6), (120.0, 0.8)):  # noqa: B007
            display.on_step(ROW, share)
    left = re.findall(r"  (\S[^ ]*(?: \S+)*) left", console.file.getvalue())  # type: ignore[attr-defined]
    assert left == ["?", "4 min 0 s", "1 min 20 s"]


@loop_over("error", [BrokenPipeError(), OSError(errno.ENOSPC, "full"), ValueError("closed file")])
@loop_over("terminal", [True, False])
def test_training_continues_if_its_progress_cannot_be_written(terminal: bool, error: Exception) -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise error

    output.set_quiet(False)
    console = Console(file=output.SafeStream(Gone()), force_terminal=terminal, width=80)  # type: ignore[arg-type]
    with TrainingDisplay(console) as display:
        display.on_step(ROW, 0.5)
        display.on_spike("the loss jumped")


def test_a_second_ctrl_c_leaves_the_cursor_visible() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=80)
    with TrainingDisplay(console):
        written = console.file.getvalue()  # type: ignore[attr-defined]
        assert written.rindex("\x1b[?25h") > written.rindex("\x1b[?25l")


def test_quiet_keeps_warnings(tmp_path) -> None:
    output.set_quiet(True)
    for terminal in (False, True):
        console = Console(file=io.StringIO(), force_terminal=terminal, width=200, color_system=None)
        with TrainingDisplay(console) as display:
            display.on_step(ROW, 0.5)
            display.on_sample(tmp_path / "grid.png")
            display.on_spike("the loss jumped")
        assert console.file.getvalue() == "warning: the loss jumped\n"  # type: ignore[attr-defined]


def test_the_live_line_says_what_takes_a_while_and_then_shows_the_step_again() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=80, color_system=None)
    with TrainingDisplay(console) as display:
        display.on_step(ROW, 0.5)
        display.on_busy("validating")
        display.on_busy("")
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    _, found, after = shown.partition("validating")
    assert found and "step 12345" in after


# Messages


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


def test_messages_that_cannot_be_written_are_dropped(monkeypatch, capsys) -> None:
    closed = io.StringIO()
    closed.close()
    for stderr in (None, closed):
        monkeypatch.setattr("sys.stderr", stderr)
        output.info("wrote a file")
        output.warn("it broke")
    assert capsys.readouterr().out == ""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_training_continues_if_stderr_is_full(tmp_path) -> None:
    """The exit code must also be 0, although Python flushes stderr once more at exit."""
    arguments = ["train", "--data", "glyphs", "--image-size", "8", "--preset", "tiny", "--steps", "2", "--batch", "2"]
    code, result, _ = run_command(*arguments, "--out", tmp_path / "run", "--json", stderr="/dev/full")
    assert code == 0
    assert json.loads(result)["steps"] == 2
