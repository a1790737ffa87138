"""Tests that random options, settings, checkpoints and images give a result or a one-line error."""

import hashlib
import io
import json
import math
import shutil
import socket
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from faults.random_cases import anything, cases, nearly, numbers, one_line_or_result
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from linformer_cli.attention.catalogue import CATALOGUE
from linformer_cli.checkpoint import load_model, load_training_state
from linformer_cli.checkpoint import read_checkpoint as read
from linformer_cli.checkpoint_files import CONFIG, TRAINING, WEIGHTS, find_checkpoint
from linformer_cli.cli.app import main
from linformer_cli.cli.options import parse_duration, parse_pairs
from linformer_cli.config import ImageShape, RunConfig
from linformer_cli.data.look import Look
from linformer_cli.data.parts import choose_part
from linformer_cli.data.pictures import load_picture
from linformer_cli.documents import parse_config
from linformer_cli.model.mixers import parse_options
from linformer_cli.presets import find_preset
from linformer_cli.sampling.choose import Filters
from linformer_cli.system.device import choose_device
from linformer_cli.training.settings import Given, merge_settings

SHAPE = ImageShape(height=6, width=4, channels=3)


def test_random_options_give_a_result_or_a_one_line_error(share: float) -> None:
    @cases(share, 2000)
    @given(
        text=st.text(max_size=30) | nearly | paths,
        value=anything,
        number=numbers,
        names=st.sets(st.sampled_from(sorted(CATALOGUE)), min_size=2, max_size=2),
    )
    def run(text: str, value: Any, number: Any, names: set[str]) -> None:
        one_line_or_result(lambda: parse_duration(text))
        one_line_or_result(lambda: parse_pairs([text, "a=b"], "--attention-option"))
        one_line_or_result(lambda: choose_part(text, text, None, SHAPE).pixels)
        one_line_or_result(lambda: choose_part(f"top:{text}", f"box:{text}", None, SHAPE).pixels)
        one_line_or_result(lambda: choose_device(text))
        one_line_or_result(lambda: find_preset(text))
        if "\0" not in text:
            one_line_or_result(lambda: find_checkpoint(text))
        one_line_or_result(lambda: Filters(number, None, None))
        one_line_or_result(lambda: Filters(1.0, number if isinstance(number, int) else None, None))
        one_line_or_result(lambda: Filters(1.0, None, number))
        for name in sorted(names):
            for key in [text, *CATALOGUE[name].options_type.model_fields]:
                one_line_or_result(lambda name=name, key=key: parse_options(name, {key: value}))

    run()


COMMANDS = ("train", "sample", "complete", "eval", "score", "check", "bench", "attentions", "info", "export", "env", "")
FLAGS = (
    *("-n", "-o", "--checkpoint", "--count", "--batch", "--seed", "--temperature", "--top-k", "--top-p"),
    *("--device", "--json"),
    *("--precision", "--keep", "--fit", "--steps", "--epochs", "--max-time", "--preset", "--attention", "--resume"),
    *("--attention-option", "--config", "--split", "--data", "--limit", "--format", "--dtype", "--help", "--version"),
)
paths = st.text("a/", min_size=250, max_size=300)  # longer than file systems allow
odd = ["", "-", "--", "1", "0", "-1", "1e9", "/", ".", "\u00b2", str(2**63 - 1), str(2**63), "9" * 400, "9" * 5000]
words = st.text(max_size=10) | st.sampled_from(FLAGS) | nearly | st.sampled_from(odd)


def test_random_command_lines_give_a_one_line_error(share: float, tmp_path, monkeypatch, capsys) -> None:
    # There are no models and no data, so even valid commands end with an error.
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LINTX_DATA", str(tmp_path / "none"))
    monkeypatch.setattr("linformer_cli.checkpoint_files.shipped_checkpoints", dict)
    monkeypatch.setattr(socket, "getaddrinfo", _no_network)

    @cases(share, 10_000)
    @given(command=st.sampled_from(COMMANDS), arguments=st.lists(words, max_size=6))
    def run(command: str, arguments: list[str]) -> None:
        arguments = [argument for argument in arguments if "\0" not in argument]
        if command in ("attentions", "env") and not arguments:
            return
        if command == "train":  # replaces an earlier --data, which could train on glyphs or start a download
            arguments = [*arguments, "--data", "array:none"]
        monkeypatch.setattr(sys, "argv", ["lintx", command, *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        if ended.value.code:
            assert ended.value.code in (1, 2)
            assert captured.err.count("\n") <= 6, captured.err

    run()


def _no_network(*address: object, **_options: object) -> None:
    pytest.fail(f"a fuzzed command asks the network for {address}")


def test_random_settings_give_a_result_or_a_one_line_error(share: float, tmp_path: Path) -> None:
    valid = {
        "preset": "tiny",
        "model": {"image": {"height": 8, "width": 8}, "layers": 2, "attention": "linear"},
        "data": {"name": "mnist"},
        "train": {"steps": 5, "learning_rate": 0.1},
    }
    keys = st.sampled_from(["model", "data", "train", "preset", "image", "layers", "attention", "steps", "name"])
    document = st.dictionaries(keys | st.text(max_size=8), anything, max_size=4)
    file = tmp_path / "settings.toml"

    @cases(share, 2000)
    @given(document=document, table=st.sampled_from([*valid]), text=st.text(max_size=60))
    def run(document: dict[str, Any], table: str, text: str) -> None:
        one_line_or_result(lambda: parse_config(RunConfig, {**valid, **document}, "run"))
        inside = {**valid[table], **document} if isinstance(valid[table], dict) else document
        one_line_or_result(lambda: parse_config(RunConfig, {**valid, table: inside}, "run"))
        file.write_text(text if len(text) % 2 else f"[model]\nlayers = {text}\n", encoding="utf-8", errors="replace")
        one_line_or_result(lambda: merge_settings(Given(), file).build(SHAPE))

    run()


def test_random_checkpoints_give_a_result_or_a_one_line_error(share: float, tiny_checkpoint: Path, tmp_path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(tiny_checkpoint, folder)
    whole = {name: (folder / name).read_bytes() for name in (WEIGHTS, TRAINING)}
    document = json.loads((folder / CONFIG).read_text())
    del document["config_sha256"]
    paths = [(key,) for key in document] + [
        (key, inner) for key, value in document.items() if isinstance(value, dict) for inner in value
    ]
    # Larger numbers would build huge models.
    small = anything.filter(lambda value: not isinstance(value, int) or value < 64)

    def attempt() -> None:
        read(folder)
        load_model(folder)
        load_training_state(read(folder))

    @cases(share, 4000)
    @given(
        path=st.sampled_from(paths),
        value=small,
        name=st.sampled_from([WEIGHTS, TRAINING]),
        places=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), max_size=4),
        inside=st.sampled_from(["header", "file"]),
        kept=st.floats(0.5, 1.5),
    )
    def run(path: tuple[str, ...], value: Any, name: str, places: list[Any], inside: str, kept: float) -> None:
        changed = json.loads(json.dumps(document))
        target = changed
        for key in path[:-1]:
            target = target[key]
        target[path[-1]] = value
        (folder / CONFIG).write_text(json.dumps(changed))
        one_line_or_result(attempt)
        damaged = bytearray(whole[name])
        header = 8 + int.from_bytes(damaged[:8], "little")
        for place, byte in places:
            damaged[math.floor(place * (header if inside == "header" else len(damaged)))] = byte
        (folder / name).write_bytes(damaged[: math.floor(kept * len(damaged))])
        digests = {f: hashlib.sha256((folder / f).read_bytes()).hexdigest() for f in whole}
        signed = {**document, "weights_sha256": digests[WEIGHTS], "training_sha256": digests[TRAINING]}
        (folder / CONFIG).write_text(json.dumps(signed))
        one_line_or_result(attempt)
        (folder / name).write_bytes(whole[name])

    run()


def test_random_pictures_give_a_result_or_a_one_line_error(share: float, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    pixels = Image.fromarray(random.integers(0, 256, (12, 10, 3), dtype=np.uint8))
    encoded = []
    for kind in ("PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF", "ICO", "PPM", "TGA", "PCX", "SGI", "DDS", "JPEG2000"):
        buffer = io.BytesIO()
        pixels.save(buffer, kind)
        encoded.append(buffer.getvalue())
    path = tmp_path / "picture"

    @cases(share, 2000)
    @given(
        whole=st.sampled_from(encoded) | st.binary(max_size=200),
        places=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), max_size=6),
        kept=st.floats(0, 2),
        behind=st.binary(max_size=20),
        fit=st.sampled_from(["crop", "pad", "stretch"]),
    )
    def run(whole: bytes, places: list[Any], kept: float, behind: bytes, fit: Any) -> None:
        damaged = bytearray(whole)
        for place, byte in places:
            if damaged:
                # Most decoder failures come from damage to the first bytes.
                damaged[math.floor(place * min(len(damaged), 64 if byte % 2 else len(damaged)))] = byte
        path.write_bytes(damaged[: math.floor(kept * len(damaged))] + behind)
        one_line_or_result(lambda: load_picture(path, Look(SHAPE), fit))

    run()
