"""Tests that foreign files, which no damage on a disk explains, give a one-line error and are never believed."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cli.conftest import run_main
from faults.runs import assert_one_line, assert_refused, sign
from loops import loop_over
from safetensors import safe_open
from safetensors.torch import load, save
from torch import Tensor

from linformer_cli.checkpoint_files import CONFIG, TRAINING, WEIGHTS

DEEP = "[" * 100_000 + "]" * 100_000
Edit = Callable[[dict[str, Any]], None]


def edit_config(run: Path, edit: Edit) -> None:
    path = run / "last" / CONFIG
    document = json.loads(path.read_text())
    del document["config_sha256"]
    edit(document)
    path.write_text(json.dumps(document))


def write_state(run: Path, tensors: dict[str, Tensor], values: str) -> None:
    (run / "last" / TRAINING).write_bytes(save(tensors, metadata={"values": values}))
    sign(run / "last", training_sha256=TRAINING)


def read_state(run: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    file = run / "last" / TRAINING
    with safe_open(file, "pt") as opened:
        return load(file.read_bytes()), json.loads(opened.metadata()["values"])


def test_documents_of_great_depth_are_refused(copy: Path, capsys) -> None:
    tensors, values = read_state(copy)
    for text in (DEEP, json.dumps(values)[:-1] + f', "more": {DEEP}}}'):
        write_state(copy, tensors, text)
        assert_refused(copy, TRAINING, capsys)
    (copy / "last" / CONFIG).write_text(DEEP)
    assert_refused(copy, WEIGHTS, capsys, "32 levels")
    (copy / "config.toml").write_text(f"a = {DEEP}")
    for arguments in (("--resume", copy), ("--config", copy / "config.toml", "--out", copy / "new")):
        assert_one_line(run_main(("train", *arguments), capsys), "32 levels")


def test_a_lone_surrogate_is_refused(copy: Path, capsys) -> None:
    edit_config(copy, lambda document: document["data"].update(name="\ud800"))
    assert_one_line(run_main(("export", copy / "last", copy / "exported"), capsys), CONFIG)


@loop_over("name", [CONFIG, WEIGHTS, TRAINING, "config.toml", "metrics.csv"])
@loop_over("kind", ["sparse", "pipe", "device"])
def test_files_without_an_end_are_refused(new_copy, capsys, name: str, kind: str) -> None:
    copy = new_copy()
    file = copy / name if (copy / name).exists() else copy / "last" / name
    file.unlink()
    if kind == "sparse":
        with open(file, "wb") as opened:
            opened.truncate(10 * 2**30)  # takes no space on the disk
    elif kind == "pipe":
        os.mkfifo(file)
    else:
        file.symlink_to("/dev/zero")
    arguments = ("sample", copy / "last", "-n", "1", "-o", copy / "out.png")
    if name not in (CONFIG, WEIGHTS):
        arguments = ("train", "--resume", copy, "--steps", "6")
    assert_one_line(run_main(arguments, capsys), name)
    if name == "config.toml":
        assert_one_line(run_main(("train", "--config", file, "--out", copy / "new"), capsys), name)
    if name == "metrics.csv":
        assert_one_line(run_main(("plot", copy, "-o", copy / "plot.png"), capsys), name)


@loop_over("value", ["2", "1", 2.0, 1.0, True, None, [1], -1, 0, 1.5])
def test_only_the_number_one_is_a_known_format(new_copy, capsys, value: Any) -> None:
    copy = new_copy()
    edit_config(copy, lambda document: document.update(format=value))
    assert_refused(copy, WEIGHTS, capsys, "format")


COUNTS = {"training": ("step", "images_seen", "elapsed_seconds", "validation_images"), "data": ("train_images",)}


@loop_over("value", [-1, 1.5, 10**30, "many"])
@loop_over(("table", "key"), [(table, key) for table, keys in COUNTS.items() for key in keys])
def test_counts_of_a_config_are_bounded(new_copy, capsys, table: str, key: str, value: Any) -> None:
    copy = new_copy()
    if key == "elapsed_seconds" and value in (1.5, 10**30):
        return
    edit_config(copy, lambda document: document[table].update({key: value}))
    assert_refused(copy, WEIGHTS, capsys, key)


@loop_over("dtype", [torch.int8, torch.int64, torch.bool, torch.complex64])
def test_weights_of_another_kind_are_refused(new_copy, capsys, dtype: torch.dtype) -> None:
    copy = new_copy()
    file = copy / "last" / WEIGHTS
    file.write_bytes(save({key: tensor.to(dtype) for key, tensor in load(file.read_bytes()).items()}))
    sign(copy / "last", weights_sha256=WEIGHTS)
    assert_refused(copy, WEIGHTS, capsys, "has type", str(dtype).removeprefix("torch."))


MOMENTS: dict[str, Callable[[dict[str, Tensor]], None]] = {
    "one missing": lambda tensors: tensors.pop("optimizer.0.exp_avg"),
    "the other missing": lambda tensors: tensors.pop("optimizer.1.exp_avg_sq"),
    "no step": lambda tensors: tensors.pop("optimizer.0.step"),
    "integers": lambda tensors: tensors.update({"optimizer.0.exp_avg": tensors["optimizer.0.exp_avg"].int()}),
    "complex": lambda tensors: tensors.update({"optimizer.0.exp_avg": tensors["optimizer.0.exp_avg"] + 0j}),
    "one number": lambda tensors: tensors.update({"optimizer.0.exp_avg": torch.tensor(1.0)}),
    "one more": lambda tensors: tensors.update({"optimizer.0.more": torch.tensor(1.0)}),
    "another parameter": lambda tensors: tensors.update({"optimizer.900.exp_avg": torch.zeros(3)}),
    "no parameter": lambda tensors: tensors.update({"optimizer.x.exp_avg": torch.zeros(3)}),
    "none at all": lambda tensors: [tensors.pop(key) for key in [*tensors] if key.startswith("optimizer.")],
    "no random state": lambda tensors: tensors.pop("random.cpu"),
    "a short random state": lambda tensors: tensors.update({"random.cpu": tensors["random.cpu"][:9].clone()}),
}


@loop_over("change", MOMENTS.values())
def test_tensors_that_do_not_fit_the_optimizer_are_refused(new_copy, capsys, change) -> None:
    copy = new_copy()
    tensors, values = read_state(copy)
    change(tensors)
    write_state(copy, tensors, json.dumps(values))
    assert_refused(copy, TRAINING, capsys, "does not fit")


WRONG = {"text": "4", "negative": -2, "fraction": 1.5, "30 digits": 10**30, "NaN": float("nan"), "null": None}
WHOLE = ("step", "images_seen", "evaluated_at", "sampled_at", "interval_steps")
REAL = ("elapsed_seconds", "best_bits_per_dim", "validation_bits_per_dim", "validation_standard_error", "interval_nats")
OPTIONAL = ("best_bits_per_dim", "validation_bits_per_dim", "validation_standard_error")


@pytest.mark.slow
@loop_over("wrong", WRONG)
@loop_over("key", [*WHOLE, *REAL, "loss.steps", "loss.mean", "loss.deviation", "loss.high"])
def test_progress_of_another_type_or_size_is_refused(new_copy, capsys, key: str, wrong: str) -> None:
    copy = new_copy()
    if key.removeprefix("loss.") in (*REAL, "mean", "deviation") and wrong in ("fraction", "30 digits", "negative"):
        return  # any finite number may be real
    if key in OPTIONAL and wrong == "null":
        return
    tensors, values = read_state(copy)
    target = values["loss"] if key.startswith("loss.") else values
    target[key.removeprefix("loss.")] = WRONG[wrong]
    write_state(copy, tensors, json.dumps(values))
    assert_refused(copy, TRAINING, capsys, key)


def test_progress_without_its_step_or_with_unknown_keys_is_refused(copy: Path, capsys) -> None:
    tensors, values = read_state(copy)
    for unknown in ({"steps": 3}, {"loss": {"level": 1}}):
        write_state(copy, tensors, json.dumps(values | unknown))
        assert_refused(copy, TRAINING, capsys, "training state")
    for key in ("step", "images_seen"):
        write_state(copy, tensors, json.dumps({name: value for name, value in values.items() if name != key}))
        assert_refused(copy, TRAINING, capsys, key)


@loop_over("text", ["\u00b2", "\u0663", "9" * 400, "9" * 5000, "-1", "+1", "1_0", "1.5"])
def test_a_step_that_is_no_count_is_not_read(new_copy, capsys, text: str) -> None:
    copy = new_copy()
    file = copy / "metrics.csv"
    first, *rows = file.read_text(encoding="utf-8").splitlines()
    file.write_text("\n".join([first, text + rows[0][rows[0].index(",") :], *rows]) + "\n", encoding="utf-8")
    assert_one_line(run_main(("plot", copy, "-o", copy / "plot.png"), capsys), "line 2")
    assert run_main(("train", "--resume", copy, "--steps", "6"), capsys).code == 0
    assert text + "," not in file.read_text(encoding="utf-8").replace("step,", "")  # such rows are dropped


def test_control_characters_of_a_config_are_not_printed(copy: Path, capsys) -> None:
    edit_config(copy, lambda document: document["data"].update(name="a\x1b[2J\x07\x9b\u202eb"))
    outcome = run_main(("info", copy / "last"), capsys)
    assert outcome.code == 0
    assert all(character.isprintable() or character == "\n" for character in outcome.stdout)


@pytest.mark.skipif(os.name == "nt", reason="paths on Windows are text")
def test_a_run_may_have_a_path_that_is_not_utf8(copy: Path, capsys) -> None:
    run = copy.rename(copy.with_name(os.fsdecode(b"n\xffme")))
    out, exported = copy.parent / "out.png", copy.parent / os.fsdecode(b"\xff")
    for arguments in (
        ("train", "--resume", run, "--steps", "6"),
        ("sample", run, "-n", "1", "-o", out, "--files", copy.parent / "files"),
        ("sample", run, "-n", "2", "-o", out, "--files", copy.parent / "files"),
        ("plot", run, "-o", out),
        ("export", run, exported),
        ("info", exported),
    ):
        outcome = run_main(arguments, capsys)
        assert outcome.code == 0, outcome
