"""Tests of checkpoints named `hf:USER/NAME`, with a stand-in for the Hub on this machine."""

import json
import sys

import pytest
from hub_server import TOKEN, serve_hub

from linformer_cli.report.grids import read_png

pytest.importorskip("huggingface_hub", reason="pip install '.[hub]'")


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """The repositories of a Hub, and an empty cache. The client reads the address when it is imported."""
    for name in [name for name in sys.modules if name.startswith("huggingface_hub")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setenv("LINTX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    repositories = {"me/other": {"config.json": b'{"model_type": "bert"}'}, "me/empty": {"README.md": b"nothing"}}
    with serve_hub(repositories) as address:
        monkeypatch.setenv("HF_ENDPOINT", address)
        yield repositories


def test_a_model_is_shared_and_drawn_from(lintx, hub, run_folder, tmp_path, monkeypatch):
    export = ("export", run_folder, "hf:me/glyphs", "--license", "cc-by-4.0")
    refused = lintx(*export)
    assert refused.code == 1 and "log in with 'hf auth login'" in refused.stderr
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    outcome = lintx(*export, "--json")
    assert outcome.code == 0 and "/me/glyphs" in outcome.stderr
    files = hub["me/glyphs"]
    assert sorted(files) == ["README.md", "config.json", "model.safetensors"]
    assert files["README.md"].startswith(b"---\nlibrary_name: lintx\nlicense: cc-by-4.0\n---\n\n# glyphs\n")
    drawn = [tmp_path / name for name in ("local.png", "hub.png", "offline.png")]
    assert lintx("sample", run_folder, "-n", 1, "-o", drawn[0]).code == 0
    assert lintx("sample", "hf:me/glyphs", "-n", 1, "-o", drawn[1]).code == 0
    assert lintx("info", "hf:me/glyphs@v1", "--json").document["weights_sha256"] == outcome.document["weights_sha256"]
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert lintx("sample", "hf:me/glyphs", "-n", 1, "-o", drawn[2]).code == 0
    assert len({read_png(path).tobytes() for path in drawn}) == 1
    begun = lintx("train", "--init-from", "hf:me/glyphs", "--steps", 1, "--dry-run", "--json")
    assert begun.document["config"]["init_from"]["checkpoint"] == "hf:me/glyphs"
    # A licence stays with the weights.
    assert lintx("export", "hf:me/glyphs", tmp_path / "copy").code == 0
    assert json.loads((tmp_path / "copy" / "config.json").read_bytes())["license"] == "cc-by-4.0"


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["info", "hf:me/missing"], 1, "'hf:me/missing' is not on the Hub, or you may not read it"),
        (["info", "hf:me/empty"], 1, "'hf:me/empty' is not a lintx checkpoint: it has no config.json"),
        (["info", "hf:me/other"], 1, "config.json' is damaged"),
        (["info", "hf:a/b/c"], 1, "'hf:a/b/c': Repo id must be"),
        (["export", "tiny", "hf:me/x"], 2, "such as --license mit"),
        (["export", "tiny", "hf:me/x", "--license", "my own"], 2, "found 'my own'"),
        (["export", "tiny", "hf:me/x", "--license", "mit", "--dtype", "int8"], 2, "choose bf16"),
    ],
)
def test_mistakes_give_one_line(lintx, hub, tmp_path, monkeypatch, arguments, code, said):
    monkeypatch.chdir(tmp_path)
    outcome = lintx(*arguments)
    assert (outcome.code, outcome.stdout, len(outcome.stderr.splitlines())) == (code, "", 1)
    assert said in outcome.stderr


def test_without_the_hub_or_its_package_one_line_says_so(lintx, hub, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    unreachable = lintx("info", "hf:me/other")
    unsent = lintx("export", "sprites", "hf:me/other", "--license", "mit")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    missing = lintx("info", "hf:me/other")
    unreached = "the Hub cannot be reached"
    for outcome, said in ((unreachable, unreached), (unsent, unreached), (missing, "pip install '.[hub]'")):
        assert outcome.code == 1 and said in outcome.stderr and len(outcome.stderr.splitlines()) == 1
