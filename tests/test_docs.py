"""Tests of the documentation: links, options, Python examples and generated tables are right."""

import itertools
import json
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from loops import loop_over
from typer.main import get_command

from linformer_cli import __version__
from linformer_cli.attention.catalogue import CATALOGUE
from linformer_cli.cli.app import app
from linformer_cli.model.mixers import BASELINES

ROOT = Path(__file__).parents[1]
GUIDE = ROOT / "docs" / "guide"
NOTEBOOK = GUIDE / "first-steps.ipynb"
PAGES = [ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")] + sorted(ROOT.glob("docs/**/*.md"))
# Pages with commands for readers to copy. `docs/reference/cli.md` is left out, because it is generated.
COMMAND_PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"] + sorted(
    path
    for kind in ("docs/guide", "docs/notes", "docs/reference/attention", "checkpoints")
    for path in ROOT.glob(f"{kind}/**/*.md")
)
COMMAND = re.compile(r"^(?:\$ )?(?:lintx|torchrun .*? -m linformer_cli) (.*)$", flags=re.MULTILINE)


def read_blocks(page: Path) -> Iterator[tuple[str, str]]:
    """Return the language and the text of every code block."""
    yield from re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def read_commands(page: Path) -> Iterator[str]:
    """Return the commands, without `lintx`, from code blocks and from inline code in the text."""
    for _, block in read_blocks(page):
        yield from COMMAND.findall(block.replace("\\\n", " "))
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    yield from re.findall(r"`lintx ([^`]+)`", text)


def read_headings(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub builds them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@loop_over("page", PAGES)
def test_link_targets_exist(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)]+)\)", page.read_text(encoding="utf-8")):
        path, _, anchor = target.partition("#")
        found = page.parent / path if path else page
        assert found.exists(), target
        if anchor:
            assert anchor in read_headings(found), target


@loop_over("page", COMMAND_PAGES)
def test_options_of_the_commands_exist(page: Path) -> None:
    for line in read_commands(page):
        command, words = get_command(app), shlex.split(line, comments=True)
        while hasattr(command, "commands") and words and not words[0].startswith("-"):
            command, words = command.get_command(None, words[0]), words[1:]
        known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
        known.add("--help")
        assert {word for word in words if re.match(r"--?[a-z]", word)} <= known, line


PYTHON = [text for language, text in read_blocks(GUIDE / "python.md") if language == "python"]


def run_example(index: int) -> dict[str, Any]:
    """Run an example of docs/guide/python.md, and return its names."""
    names: dict[str, Any] = {}
    exec(compile(PYTHON[index], "python.md", "exec"), names)
    return names


def test_python_examples_draw_images() -> None:
    names = run_example(0)
    assert names["images"].shape == (4, 28, 28, 1) and names["images"].dtype == "uint8"


def test_python_examples_train_and_complete() -> None:
    names = run_example(1)
    assert len(names["losses"]) == 20 and names["losses"][-1] < names["losses"][0]
    assert names["bits"].images == 20 and 0 < names["bits"].bits_per_dim < 8
    assert not names["model"].training and names["drawn"].shape == (4, 8, 8, 1)
    scores = names["score"](names["model"], names["images"][-20:])
    assert scores.mean() == pytest.approx(names["bits"].bits_per_dim) and scores.argmax() == names["oddest"]
    assert (names["completed"][:, :4] == names["images"][0, :4]).all()
    assert len(np.unique(names["completed"][:, 4:], axis=0)) > 1


def test_python_examples_step_and_attend() -> None:
    assert len(PYTHON) == 5
    assert float(run_example(2)["probabilities"].detach().sum()) == pytest.approx(1, abs=1e-5)
    names = run_example(3)
    assert names["y"].shape == (1, 64, 32) and (names["y"][:, -1] - names["y_t"]).abs().max() < 1e-5
    names = run_example(4)
    y, _ = names["attention"].attend(names["q"], names["k"], names["v"])
    assert (y[:, :, -1] - names["y_t"]).abs().max() < 1e-5


@pytest.mark.slow
def test_the_notebook_runs() -> None:
    names: dict[str, Any] = {}
    for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code" and not cell["source"][0].startswith("%"):
            exec(compile("".join(cell["source"]), NOTEBOOK.name, "exec"), names)
    assert names["bits"][-1] < names["bits"][0] / 2
    assert names["sevens"].shape == (8, 28, 28, 1)
    assert (names["completed"][:, :4] == names["images"][-1, :4]).all()


@pytest.mark.parametrize("name", ["install", "test"])
def test_commands_of_ci_are_marked_in_the_readme(name: str) -> None:
    marked = re.findall(rf"^<!-- ci: {name} -->\n```bash\n(.+)\n```$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert len(marked) == 1


def test_the_table_of_mechanisms_is_that_of_the_catalogue() -> None:
    rows = []
    for one in (*CATALOGUE.values(), BASELINES["lstm"]):  # `none` is not counted as a mechanism
        authors, place = one.source.split(", ", 1)
        number = place.removeprefix("arXiv ")
        link = place if number == place else f"[{number}](https://arxiv.org/abs/{number})"
        rows.append((f"| [{one.name}]({one.name}.md) | {one.family} | {one.memory.value} |", f"{authors}, {link}"))
    lines = (ROOT / "docs/reference/attention/README.md").read_text(encoding="utf-8").splitlines()
    found = [line for line in lines if re.match(r"\| \[\w+\]\(", line)]
    for line, (start, end) in itertools.zip_longest(found, rows, fillvalue=("", "")):
        assert line.startswith(start) and line.endswith(f"| {end} |")
    assert f"{len(CATALOGUE)} attention mechanisms" in (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_site_has_no_broken_link(tmp_path) -> None:
    pytest.importorskip("mkdocstrings_handlers", reason="pip install '.[docs]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", ".github/mkdocs.yml"]
    subprocess.run([*command, "--site-dir", tmp_path / "site"], cwd=ROOT, check=True, capture_output=True)
    assert (tmp_path / "site" / "guide" / "embed" / "index.html").is_file()


def test_release_files_have_the_version() -> None:
    assert f'LINTX_VERSION "{__version__}"' in (ROOT / "linformer_cli/native/runner.h").read_text()
    assert f"\nversion: {__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"## [{__version__}]" in (ROOT / "CHANGELOG.md").read_text()


def test_the_address_of_the_repository_is_the_same_everywhere() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    place = project["urls"]["Repository"].removeprefix("https://github.com/")
    assert place == "USER/lintx" or "USER" not in place
    assert f"\nrepository-code: https://github.com/{place}\n" in (ROOT / "CITATION.cff").read_text()
    for page in (*PAGES, NOTEBOOK, ROOT / "pyproject.toml", ROOT / "CITATION.cff"):
        named = re.findall(r"[Gg]it[Hh]ub(?:\.com)?/([\w.-]+/lintx)\b", page.read_text(encoding="utf-8"))
        assert set(named) <= {place}, page
