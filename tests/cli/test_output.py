"""What is said, what --quiet leaves out, and what only a terminal shows."""

import io
from collections.abc import Iterator

import numpy as np
import pytest
from rich.console import Console

from linformer_cli.cli import output


@pytest.fixture(autouse=True)
def talking() -> Iterator[None]:
    output.set_quiet(False)
    yield
    output.set_quiet(False)


@pytest.mark.parametrize("quiet", [False, True])
def test_quiet_leaves_out_talk_and_no_warning(capsys, quiet) -> None:
    output.set_quiet(quiet)
    output.talk("wrote a file")
    output.complain("it broke")
    output.say_halved(3)
    said = capsys.readouterr()
    warnings = "it broke\nout of memory; going on with 3 at once, the images stay the same\n"
    assert (said.out, said.err) == ("", warnings if quiet else "wrote a file\n" + warnings)


@pytest.mark.parametrize(
    ("terminal", "quiet", "shown"), [(True, False, True), (True, True, False), (False, False, False)]
)
def test_a_preview_is_for_terminals_that_want_to_hear(monkeypatch, terminal, quiet, shown) -> None:
    written = io.StringIO()
    monkeypatch.setattr(output, "Console", lambda stderr: Console(file=written, force_terminal=terminal, width=40))
    output.set_quiet(quiet)
    output.show_preview(np.zeros((1, 4, 4, 1), np.uint8))
    assert ("▀" in written.getvalue()) == shown
    assert shown or not written.getvalue()
