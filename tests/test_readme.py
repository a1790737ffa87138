"""What the README shows works."""

import re
import shlex
from pathlib import Path

import pytest

from linformer_cli.cli.app import app

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_python_lines_run():
    (code,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    names: dict[str, object] = {}
    exec(compile(code, "README.md", "exec"), names)
    assert names["images"].shape == (4, 28, 28, 1) and names["images"].dtype == "uint8"
    assert names["probabilities"].shape == (1, 256)
    assert float(names["probabilities"].sum()) == pytest.approx(1, abs=1e-5)


def test_there_are_two_commands_to_set_up():
    assert len(re.findall(r"^```bash$", README, flags=re.MULTILINE)) == 2


def test_links_lead_somewhere():
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (ROOT / target).exists(), target


def test_options_of_the_command_lines_exist():
    (block,) = re.findall(r"```\n(lintx .*?)```", README, flags=re.DOTALL)
    from typer.main import get_command

    lines = [shlex.split(line) for line in block.splitlines()]
    assert len(lines) == 9
    for line in lines:
        command, rest = get_command(app), line[1:]
        while hasattr(command, "commands"):
            command, rest = command.commands[rest[0]], rest[1:]
        known = {option for parameter in command.params for option in parameter.opts}
        assert {word for word in rest if word.startswith("-") and word != "-"} <= known, line
