"""Tests of `lintx demo`."""

import json
import signal
import socket
import urllib.request

import pytest
import torch
from commands import Command
from loops import first_fast

from linformer_cli.demo.build import ENGINE
from linformer_cli.demo.site import list_pages
from linformer_cli.native.program import NoProgram


@pytest.mark.smoke
def test_build_writes_the_page_and_both_programs(lintx, run_folder, tmp_path) -> None:
    outcome = lintx("demo", run_folder, "--build", tmp_path / "site")
    assert outcome.code == 0, outcome.stderr
    files = {path.name: path.read_bytes() for path in (tmp_path / "site").iterdir()}
    assert set(files) == {*(path.name for path in list_pages()), "model.lintx", "rival.lintx", "model.json"}
    assert files["engine.wasm"] == ENGINE.read_bytes()
    description = json.loads(files["model.json"])
    assert description["name"] == str(run_folder)
    assert all(len(files[name]) == size for name, size in description["sizes"].items())
    assert (description["attention"], description["states"], description["rival"]) == ("linear", ["s", "z"], "softmax")
    assert files["model.lintx"] != files["rival.lintx"]
    assert lintx("export", run_folder, tmp_path / "model.lintx").code == 0
    assert files["model.lintx"] == (tmp_path / "model.lintx").read_bytes()
    again = lintx("demo", run_folder, "--build", tmp_path / "site")
    assert (again.code, "exists already" in again.stderr) == (2, True)
    # The random weights of the rival are the same in every site.
    torch.manual_seed(5)
    assert lintx("demo", run_folder, "--build", tmp_path / "second").code == 0
    assert (tmp_path / "second" / "rival.lintx").read_bytes() == files["rival.lintx"]


def test_a_page_of_several_models_has_a_folder_for_each_further_one(lintx, run_folder, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sprites").mkdir()  # of pictures, which is not the shipped model
    assert lintx("demo", "--build", "site").code == lintx("demo", "mnist-deep", run_folder, "--build", "own").code == 0
    for folder, names in (("site", ["mnist-deep", "sprites"]), ("own", ["mnist-deep", str(run_folder)])):
        descriptions = [json.loads((tmp_path / folder / part / "model.json").read_bytes()) for part in ("", "1")]
        assert [each["name"] for each in descriptions] == names
        assert all(each["models"] == names for each in descriptions)
        sizes = {path.name: path.stat().st_size for path in (tmp_path / folder / "1").iterdir()}
        assert sizes.keys() == {"model.json", "model.lintx", "rival.lintx"}
        assert sizes["model.lintx"] == descriptions[1]["sizes"]["model.lintx"]


@pytest.mark.parametrize("number", first_fast([signal.SIGINT, signal.SIGTERM]))
def test_the_page_is_served_until_a_signal(run_folder, number) -> None:
    with Command("demo", run_folder, "--no-browser") as command:
        url = command.stdout.readline().decode().strip()
        with urllib.request.urlopen(url, timeout=20) as answer:
            assert b"<title>lintx</title>" in answer.read()
        command.send_signal(number)
        code, _, errors = command.finish()
    assert (code, errors.splitlines()[-1]) == (128 + number, "Stopped")


def test_a_used_port_is_reported(lintx, run_folder) -> None:
    with socket.socket() as used:
        used.bind(("127.0.0.1", 0))
        used.listen()
        outcome = lintx("demo", run_folder, "--no-browser", "--port", used.getsockname()[1])
    assert (outcome.code, "is not available" in outcome.stderr) == (1, True)


def test_a_model_without_a_program_is_refused(lintx, run_folder, tmp_path, monkeypatch) -> None:
    def refuse(*_: object) -> bytes:
        raise NoProgram("it does not support new attention")

    monkeypatch.setattr("linformer_cli.sampling.engines.native.encode_model", refuse)
    outcome = lintx("demo", run_folder, "--build", tmp_path / "site")
    assert outcome.code == 1
    assert outcome.stderr.splitlines()[-1].endswith("cannot become a program: it does not support new attention")
    assert not (tmp_path / "site").exists()
