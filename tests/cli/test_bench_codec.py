"""Tests of `lintx bench codec` from the command line to its table and picture."""

import signal

import pytest
from machine import needs_library
from PIL import Image

from linformer_cli.bench import codec

pytest.importorskip("constriction")
pytestmark = needs_library


@pytest.fixture
def command(lintx, run_folder, tmp_path):
    """Provides `command(*arguments)`: the benchmark with few images and --picture."""

    def run(*arguments):
        picture = ["--picture", tmp_path / "new" / "bits.png"]
        return lintx("bench", "codec", "--checkpoint", run_folder, "--limit", 4, "--repeats", 1, *picture, *arguments)

    return run


@pytest.mark.smoke
def test_the_rows_and_the_picture(command, lintx, tmp_path) -> None:
    document = command("--json").document
    assert [row["name"] for row in document["rows"]][:2] == ["raw pixels", "lintx"]
    with Image.open(document["picture"]) as picture:
        assert picture.format == "PNG"
    lintx("train", "--data", "glyphs", "--preset", "tiny", "--classes", "--steps", 1, "--out", tmp_path / "run")
    assert command("--checkpoint", tmp_path / "run", "--limit", 13).code == 0  # it shows 12


def test_ctrl_c_leaves_out_the_picture(command, monkeypatch, tmp_path) -> None:
    compress = codec.lzma.compress

    def press(*given, **options):
        signal.raise_signal(signal.SIGINT)
        return compress(*given, **options)

    monkeypatch.setattr(codec.lzma, "compress", press)
    outcome = command("--json")
    assert outcome.code == 130 and outcome.document["ended"] == "interrupted"
    assert "lintx" in [row["name"] for row in outcome.document["rows"]]
    assert outcome.document["picture"] is None and not (tmp_path / "new").exists()


def test_a_picture_on_a_full_disk_does_not_lose_the_table(command, full_disk) -> None:
    outcome = command("--json")
    assert outcome.code == 1 and "no space left on device" in outcome.stderr
    assert outcome.document["rows"]
