"""Tests that damaged and foreign checkpoints give a one-line error and exit code 1.

Nothing may be overwritten, and memory must stay bounded.
"""

import itertools
import json
import math
import os
import pickle
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cli.conftest import run_main
from faults.runs import DIGESTS, assert_refused, sign, use
from loops import loop_over
from PIL import Image

from linformer_cli.checkpoint import load_model, read_checkpoint, save_checkpoint
from linformer_cli.checkpoint_files import CONFIG, TRAINING, WEIGHTS
from linformer_cli.system.memory import measure_peak_memory

TENTHS, FLIPS = 10, 16
FILES = (WEIGHTS, CONFIG, TRAINING)
Change = Callable[[bytes], bytes]


def test_the_run_can_be_used_before_it_is_damaged(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for file in FILES:
        outcome = use(copy, file, capsys)
        assert outcome.code == 0, outcome


@loop_over("file", FILES)
@loop_over("tenth", range(TENTHS))
def test_a_truncated_file_is_refused(new_copy, capsys, file: str, tenth: int) -> None:
    copy = new_copy()
    path = copy / "last" / file
    data = path.read_bytes()
    path.write_bytes(data[: len(data) * tenth // TENTHS])
    assert_refused(copy, file, capsys, file)


@pytest.mark.parametrize("file", FILES)
def test_a_file_with_one_changed_bit_is_refused(copy: Path, capsys, file: str, share: float) -> None:
    path = copy / "last" / file
    data, places = path.read_bytes(), random.Random(7)
    for _ in range(max(round(500 * share), FLIPS)):
        bit = places.randrange(8 * len(data))
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        if file == CONFIG and same_document(damaged, data):
            continue
        assert_refused(copy, file, capsys)


def same_document(damaged: bytes, whole: bytes) -> bool:
    """Tell whether the documents are equal. A changed last digit of a float can leave the number unchanged."""
    try:
        return bool(json.loads(damaged) == json.loads(whole))
    except ValueError:
        return False


FOREIGN: dict[str, Change] = {
    "a header of 10 GB": lambda data: struct.pack("<Q", 10 * 2**30) + data[8:],
    "a header longer than the file": lambda data: struct.pack("<Q", len(data)) + data[8:],
    "a pickle": lambda data: pickle.dumps({"weights": [1.0]}),
    "a torch file": lambda data: b"PK\x03\x04" + data,
    "half of the file": lambda data: data[: len(data) // 2],
    "nothing": lambda data: b"",
    "text": lambda data: b"these are no weights\n" * 40,
}


@loop_over("file", DIGESTS)
@loop_over("change", FOREIGN.values())
def test_a_foreign_file_with_the_right_digest_is_refused(new_copy, capsys, file: str, change: Change) -> None:
    copy = new_copy()
    path = copy / "last" / file
    path.write_bytes(change(path.read_bytes()))
    sign(copy / "last", **{DIGESTS[file]: file})
    before = measure_peak_memory()
    assert_refused(copy, file, capsys, file)
    assert measure_peak_memory() - before < 64 * 2**20


@loop_over("change", ["--width=48", "--layers=3", "--attention=softmax", "--head=mixture"])
def test_the_file_of_another_model_is_refused(new_copy, small_run_options, capsys, change) -> None:
    other = new_copy().parent / "other"
    assert run_main(("train", *small_run_options, change, "--steps", "1", "--out", other), capsys).code == 0
    for file, signed in itertools.product(DIGESTS, (False, True)):
        copy = new_copy()
        shutil.copy(other / "last" / file, copy / "last" / file)
        if signed:
            sign(copy / "last", **{DIGESTS[file]: file})
        if signed and change == "--attention=softmax":
            # The tensors have the same names and shapes, so only the digest can tell the models apart.
            assert use(copy, file, capsys).code == 0
        else:
            assert_refused(copy, file, capsys)


@loop_over("file", DIGESTS)
def test_a_link_out_of_the_folder_is_refused(new_copy, capsys, file: str) -> None:
    copy = new_copy()
    outside = copy.parent / "outside.safetensors"
    os.rename(copy / "last" / file, outside)
    (copy / "last" / file).symlink_to(outside)
    assert_refused(copy, file, capsys, "links to a file outside its folder")


@pytest.mark.parametrize("name", ["model.pt", "weights.pth", "last.ckpt", "model.bin", "model.pkl"])
def test_a_pickle_is_never_opened(tmp_path: Path, capsys, name: str) -> None:
    class Bomb:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "executed"),)

    (tmp_path / name).write_bytes(pickle.dumps(Bomb()))
    outcome = run_main(("sample", tmp_path / name, "-o", tmp_path / "out.png"), capsys)
    assert outcome.code == 1 and f"{name}' " in outcome.stderr
    assert "never opened" in outcome.stderr and "can run any code" in outcome.stderr
    assert not (tmp_path / "executed").exists()


@loop_over("value", [torch.nan, 1e30])  # products of weights of 1e30 are infinite
def test_a_model_that_gives_nan_is_refused(new_copy, capsys, value: float) -> None:
    copy = new_copy()
    model = load_model(copy / "last")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(value)
    save_checkpoint(copy.parent / "nan", model, read_checkpoint(copy / "last").info)
    nan, out, picture = (copy.parent / name for name in ("nan", "out.png", "picture.png"))
    Image.new("L", (28, 28), 90).save(picture)
    for arguments in (
        ("sample", nan, "-n", "1", "-o", out),
        ("eval", nan),
        ("eval", nan, "--engine", "native"),
        ("score", picture, "--checkpoint", nan),
        ("export", nan, out),
    ):
        if arguments[0] == "export" and math.isfinite(value):
            continue
        outcome = run_main(arguments, capsys)
        assert outcome.code == 1 and "not a finite number" in outcome.stderr, outcome
    assert not out.exists()
