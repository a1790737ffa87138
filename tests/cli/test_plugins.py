"""Tests of mechanisms from outside the package, with the one of docs/guide/mechanisms.md."""

import importlib
import sys

import pytest
from test_docs import GUIDE, read_blocks

from linformer_cli.attention import plugins
from linformer_cli.attention.base import AttentionShape
from linformer_cli.attention.catalogue import CATALOGUE, find_attention
from linformer_cli.errors import UsageError
from linformer_cli.model.mixers import build_attention

(TEMPLATE,) = (text for language, text in read_blocks(GUIDE / "mechanisms.md") if language == "python")
# Sees the future only in passes that are longer than usual chunks.
LEAK = "v + v.mean(2, True) if v.shape[2] > 256 else v"


@pytest.fixture(autouse=True)
def decay(monkeypatch, tmp_path):
    """The file of the mechanism in the working folder. At the end, the mechanism is forgotten."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(plugins.VARIABLE, "")
    (tmp_path / "mine.py").write_text(TEMPLATE)
    yield tmp_path / "mine.py"
    CATALOGUE.pop("decay", None)
    plugins.read_packages.cache_clear()


@pytest.mark.smoke
def test_the_mechanism_of_the_guide_keeps_the_contract(lintx) -> None:
    outcome = lintx("check", "--mechanism", "mine.py:DecayAttention", "--json")
    assert outcome.code == 0, outcome.stderr
    assert outcome.document["passed"] and outcome.document["attention_options"] == {"decay": 0.9}
    assert len(outcome.document["rows"]) == 16 and all(row["passed"] for row in outcome.document["rows"])
    outcome = lintx("check", "--plugin", "mine.py", "--mechanism", "decay:decay=0.5")
    assert "passed: 16 checks of 'decay-0.5'" in outcome.stderr


@pytest.mark.parametrize(
    ("before", "after", "check"),
    [
        ("state.s.mul_(self.options.decay)", "state.s.mul_(0.8)", "steps equal one pass: from position 1 of "),
        (".tril()", "", "later inputs change no earlier output: from position 0 of "),
        ("        y =", f"        v = {LEAK}\n        y =", "later inputs change nothing in a pass of 600: from "),
        ("before[-1] * s)", "s)", "blocks equal one pass: from position"),
        ("DecayState((k *", "DecayState(s.zero_() + (k *", "attend modifies neither state nor inputs"),
        ("before * (q @ s)", "before * (q @ s.detach())", "gradients pass through the state"),
        ("(q @ k.mT", "(q @ k.roll(1, 0).mT", "other images change nothing"),
        ("dtype=dtype", "dtype=torch.float32", "a constant state has the bytes that it claims"),
        ("v[:, :, t, None, :] / k", "v[:, :, t, None, :] * 2 / k", "outputs and gradients are those of the oracle"),
        ("before * (q @ s)", "before * (q @ s.mT)", "steps equal one pass: RuntimeError in '"),
    ],
)
def test_a_planted_error_is_found(lintx, decay, before, after, check) -> None:
    assert before in TEMPLATE
    decay.write_text(TEMPLATE.replace(before, after))
    outcome = lintx("check", "--mechanism", "mine:DecayAttention", "--json")
    assert outcome.code == 1 and "'decay' breaks the contract in" in outcome.stderr
    failed = [f"{row['name']}: {row['where']}" for row in outcome.document["rows"] if not row["passed"]]
    assert any(line.startswith(check) for line in failed), failed
    assert outcome.stderr.count("RuntimeError") == sum("RuntimeError" in line for line in failed) <= 1
    if after == "s)":  # the state is wrong also without a NaN
        assert not any("NaN" in line for line in failed), failed


def test_a_plugin_is_trained_sampled_and_measured(lintx, monkeypatch) -> None:
    train = ("train", "--data", "glyphs", "--image-size", 8, "--preset", "tiny", "--steps", 2, "--batch", 2)
    outcome = lintx(*train, "--attention", "decay", "--plugin", "mine.py", "--evaluate-images", 2, "--out", "run")
    assert outcome.code == 0, outcome.stderr
    outcome = lintx("sample", "run", "--plugin", "mine.py", "-n", 1, "-o", "grid.png")
    assert outcome.code == 0 and "engine reference" in outcome.stderr
    assert lintx("check", "run", "--plugin", "mine.py").code == 0
    assert "sum with a fixed decay" in lintx("attentions", "decay", "--plugin", "mine.py").stdout
    rows = ("--format", "md", "--attention", "softmax,decay", "--images", 2, "--batch", 1, "--repeats", 1)
    table = lintx("compare", *train[1:7], *rows, "--plugin", "mine.py", "--runs", "both").stdout
    assert [line.split()[-2] for line in table.splitlines() if "--" not in line] == ["engine", "native", "reference"]
    CATALOGUE.pop("decay")
    monkeypatch.setenv(plugins.VARIABLE, "")
    outcome = lintx("sample", "run", "-n", 1, "-o", "grid.png")
    assert outcome.code == 1 and "unknown attention 'decay'" in outcome.stderr
    assert outcome.stderr.endswith("(if it is your own: --plugin FILE.py)\n")


def test_an_installed_package_announces_its_mechanism(monkeypatch, tmp_path) -> None:
    (tmp_path / "mine-1.dist-info").mkdir()
    (tmp_path / "mine-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1\n")
    announced = tmp_path / "mine-1.dist-info" / "entry_points.txt"
    announced.write_text("[lintx.mechanisms]\ndecay = mine:DecayAttention\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    assert find_attention("decay").__module__ == "mine"
    assert build_attention("decay", {"decay": 0.5}, AttentionShape(2, 8, 8, 64, 8)).options.decay == 0.5
    (tmp_path / "shim.py").write_text("from mine import DecayAttention as Mine\n")
    assert [found.name for found in plugins.read_file(str(tmp_path / "shim.py"))] == ["decay"]
    sys.modules.pop("mine")
    announced.write_text("[lintx.mechanisms]\ndecay = mine:Missing\n")
    plugins.read_packages.cache_clear()
    CATALOGUE.pop("decay")
    with pytest.raises(UsageError, match=r"mechanism 'decay' of an installed package: .*Missing"):
        find_attention("decay")
    assert find_attention("linear")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: "x = 1\n", "defines no mechanism"),
        (lambda text: text + "\n1 / 0\n", "ZeroDivisionError: division by zero"),
        (lambda text: "from .parts import x\n", "known parent package; install it as a package, whose entry point"),
        (lambda text: text.replace('name = "decay"', 'name = "linear"'), "there already is a mechanism 'linear'"),
        (lambda text: text.replace("    family", "    kind"), "DecayAttention does not define family"),
        (lambda text: text.replace("def _step", "def step_"), "DecayAttention does not define _step"),
    ],
)
def test_a_file_that_is_no_plugin_gives_one_line(decay, change, message, monkeypatch, raises_one_line) -> None:
    decay.write_text(change(TEMPLATE))
    monkeypatch.setenv(plugins.VARIABLE, str(decay))
    with raises_one_line(UsageError, "mine", message):
        find_attention("linear")


def test_a_wrong_name_gives_one_line(lintx) -> None:
    for arguments, message in (
        (("--mechanism", "mine:Decay"), "unknown mechanism of 'mine' 'Decay'; did you mean 'DecayAttention'?"),
        (("--mechanism", "nothing:Decay"), "No module named 'nothing'; write FILE.py:CLASS or MODULE:CLASS"),
        (("--mechanism", "json:JSONDecoder"), "'json:JSONDecoder' is no mechanism"),
        (("--plugin", "other.py"), "--plugin takes a Python file, such as mine.py, found 'other.py'"),
        (("run", "--mechanism", "linear"), "--mechanism checks a mechanism without a model; drop the checkpoint"),
    ):
        outcome = lintx("check", *arguments)
        assert outcome.code == 2 and message in outcome.stderr and outcome.stderr.count("\n") == 1
