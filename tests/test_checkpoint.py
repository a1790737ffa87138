"""Tests of checkpoints. They are complete or absent, checked before use, and found by run, folder or name."""

import builtins
import errno
import hashlib
import itertools
import json
import os
import pickle
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from loops import first_fast
from safetensors.torch import load_file, save_file

from linformer_cli import checkpoint_files
from linformer_cli import files as files_module
from linformer_cli.checkpoint import (
    TrainingState,
    load_model,
    load_training_state,
    load_weights,
    open_checkpoint,
    read_checkpoint,
    save_checkpoint,
)
from linformer_cli.checkpoint_files import (
    CARD,
    CONFIG,
    DEFAULT_CHECKPOINT,
    TRAINING,
    WEIGHTS,
    find_checkpoint,
    shipped_checkpoints,
)
from linformer_cli.errors import CheckpointError, UsageError
from linformer_cli.files import TEMPORARY_FILES, temporary_path
from linformer_cli.model.pixel_model import PixelModel
from linformer_cli.system.memory import measure_peak_memory


@pytest.fixture
def mine(tmp_path: Path, tiny_checkpoint: Path) -> Path:
    """A copy of the tiny checkpoint that a test may damage."""
    return Path(shutil.copytree(tiny_checkpoint, tmp_path / "mine"))


def killed_write(folder: Path) -> Path:
    """A name in `folder` that a killed process may have left behind."""
    return folder / temporary_path(folder.parent).name.replace(f"-{os.getpid()}-", "-99999999-")


def equal_weights(model: PixelModel, other: PixelModel) -> bool:
    ours, theirs = model.state_dict(), other.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)


def edit_config(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    document = json.loads((folder / CONFIG).read_text())
    change(document)
    document.pop("config_sha256", None)  # a user who edits the file must also remove this line
    (folder / CONFIG).write_text(json.dumps(document))


def edit_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Change the weights and their digest, so that only a comparison with the model can find the change."""
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)
    believe(folder, WEIGHTS)


def believe(folder: Path, name: str) -> None:
    """Update the file's digest in config.json."""
    key = {WEIGHTS: "weights_sha256", TRAINING: "training_sha256"}[name]
    digest = hashlib.sha256((folder / name).read_bytes()).hexdigest()
    edit_config(folder, lambda document: document.update({key: digest}))


# Save and load


@pytest.mark.parametrize(
    "changes",
    [
        {"attention": "softmax"},
        {"attention_options": {"feature_map": "learned", "features": 5, "chunk": 16}},
        {"embedding": "paper", "norm": "post", "head": "mixture", "context": "previous"},
    ],
)
def test_every_kind_of_model_is_read_back(tmp_path, build_tiny_model, tiny_info, changes) -> None:
    model = build_tiny_model(**changes)
    save_checkpoint(tmp_path / "last", model, tiny_info.model_copy(update={"model": model.config}))
    again = load_model(tmp_path / "last")
    assert equal_weights(model, again) and not equal_weights(model, build_tiny_model(seed=1, **changes))
    assert again.config == model.config and not again.training


def test_the_training_state_is_read_back_bit_for_bit(tiny_checkpoint, tiny_training_state) -> None:
    state = load_training_state(read_checkpoint(tiny_checkpoint))
    assert state.values == tiny_training_state.values
    assert state.tensors.keys() == tiny_training_state.tensors.keys()
    for key, tensor in tiny_training_state.tensors.items():
        assert state.tensors[key].dtype == tensor.dtype
        assert torch.equal(state.tensors[key], tensor)


def test_config_json_has_the_digests_of_the_files(tmp_path, build_tiny_model, tiny_info, tiny_training_state) -> None:
    written = save_checkpoint(tmp_path / "last", build_tiny_model(), tiny_info, tiny_training_state)
    read = read_checkpoint(tmp_path / "last")
    assert read.info == written
    assert read.digest == hashlib.sha256((tmp_path / "last" / WEIGHTS).read_bytes()).hexdigest()
    assert read.info.training_sha256 == hashlib.sha256((tmp_path / "last" / TRAINING).read_bytes()).hexdigest()
    assert (
        read.info.model_copy(update={"weights_sha256": "", "training_sha256": None, "config_sha256": None}) == tiny_info
    )
    assert {path.name for path in (tmp_path / "last").iterdir()} == {WEIGHTS, CONFIG, TRAINING, CARD}
    assert [path.name for path in tmp_path.iterdir()] == ["last"]


def test_saving_does_not_change_the_model(tmp_path, build_tiny_model, tiny_info) -> None:
    model = build_tiny_model().train()
    save_checkpoint(tmp_path / "last", model, tiny_info, weights_dtype=torch.bfloat16)
    assert model.training
    assert equal_weights(model, build_tiny_model())
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_a_model_can_be_loaded_in_another_type(build_tiny_model, tiny_checkpoint) -> None:
    for dtype in (torch.float64, torch.bfloat16):
        assert equal_weights(load_model(tiny_checkpoint, dtype=dtype), build_tiny_model().to(dtype))


def test_weights_can_be_rounded_for_shipping(tmp_path, build_tiny_model, tiny_info, tiny_checkpoint) -> None:
    save_checkpoint(tmp_path / "small", build_tiny_model(), tiny_info, weights_dtype=torch.bfloat16)
    assert equal_weights(load_model(tmp_path / "small"), build_tiny_model().bfloat16().float())
    small, large = ((folder / WEIGHTS).stat().st_size for folder in (tmp_path / "small", tiny_checkpoint))
    assert small < 0.6 * large
    assert read_checkpoint(tmp_path / "small").digest != read_checkpoint(tiny_checkpoint).digest


def test_only_floating_point_weights_are_rounded(tmp_path, build_tiny_model, tiny_info) -> None:
    model = build_tiny_model()
    model.register_buffer("counts", torch.arange(1000, 1010))
    save_checkpoint(tmp_path / "small", model, tiny_info, weights_dtype=torch.bfloat16)
    assert load_file(tmp_path / "small" / WEIGHTS)["counts"].tolist() == list(range(1000, 1010))


def test_a_checkpoint_without_training_state_cannot_be_resumed(tmp_path, build_tiny_model, tiny_info, raises_one_line):
    save_checkpoint(tmp_path / "best", build_tiny_model(), tiny_info)
    assert not (tmp_path / "best" / TRAINING).exists()
    with raises_one_line(CheckpointError, "no training state", "last/"):
        load_training_state(read_checkpoint(tmp_path / "best"))


def test_a_later_checkpoint_without_training_state_removes_the_old_one(mine, build_tiny_model, tiny_info) -> None:
    assert (mine / TRAINING).exists()
    save_checkpoint(mine, build_tiny_model(), tiny_info)
    assert not (mine / TRAINING).exists()


def test_the_model_card_describes_the_model(tmp_path, build_tiny_model, tiny_info) -> None:
    save_checkpoint(tmp_path / "mine", build_tiny_model(), tiny_info)
    card = (tmp_path / "mine" / CARD).read_text()
    assert card.startswith("# mine\n")
    assert "linear attention" in card
    assert f"{build_tiny_model().parameter_count():,} parameters" in card
    assert "48 images in 3 steps" in card
    assert "Validation" not in card
    measured = {"validation_bits_per_dim": 1.25, "validation_standard_error": 0.5, "validation_images": 77}
    training = tiny_info.training.model_copy(update=measured)
    save_checkpoint(tmp_path / "mine", build_tiny_model(), tiny_info.model_copy(update={"training": training}))
    assert "1.2500 +- 0.5000 bits/dim over 77 images" in (tmp_path / "mine" / CARD).read_text()


def test_no_pickle_is_written_or_opened(tmp_path, monkeypatch, build_tiny_model, tiny_info, tiny_training_state):
    def refuse(*_arguments: object, **_options: object) -> None:
        raise AssertionError("a pickle was written or opened")

    for name in ("load", "loads", "dump", "dumps", "Unpickler", "Pickler"):
        monkeypatch.setattr(pickle, name, refuse)
    for name in ("load", "save"):
        monkeypatch.setattr(torch, name, refuse)
    save_checkpoint(tmp_path / "last", build_tiny_model(), tiny_info, tiny_training_state)
    load_training_state(read_checkpoint(tmp_path / "last"))
    assert equal_weights(load_model(tmp_path / "last"), build_tiny_model())


# Damage


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (lambda tensors: (tensors.pop("norm.weight"), tensors.pop("norm.bias")), ("2 missing tensors", "norm.bias")),
        (lambda tensors: tensors.update(zebra=torch.ones(2), ant=torch.ones(2)), ("2 unknown tensors", "ant")),
        (lambda tensors: tensors.update({"norm.weight": torch.ones(3)}), ("norm.weight", "[3]", "[16]")),
    ],
)
def test_weights_must_be_exactly_those_of_the_config(mine, raises_one_line, change, parts) -> None:
    edit_weights(mine, change)
    with raises_one_line(CheckpointError, WEIGHTS, *parts):
        load_model(mine)


@pytest.mark.parametrize("name", [WEIGHTS, TRAINING])
def test_a_missing_file_is_named(mine, raises_one_line, name) -> None:
    (mine / name).unlink()
    with raises_one_line(CheckpointError, f"no {name}", str(mine)):
        load_model(mine) if name == WEIGHTS else load_training_state(read_checkpoint(mine))


def test_saving_works_even_if_an_older_save_cannot_be_removed(tmp_path, tiny_info, monkeypatch) -> None:
    """On a network file system, a file that another process has open may not be removed."""
    original = shutil.rmtree
    monkeypatch.setattr(
        checkpoint_files.shutil,
        "rmtree",
        lambda path, **more: None if str(path).endswith(".replaced") else original(path, **more),
    )
    for step in range(4):
        training = tiny_info.training.model_copy(update={"step": step})
        save_checkpoint(
            tmp_path / "last", PixelModel(tiny_info.model), tiny_info.model_copy(update={"training": training})
        )
    assert read_checkpoint(tmp_path / "last").info.training.step == 3


@pytest.mark.parametrize("load", [load_weights, load_training_state])
def test_a_checkpoint_replaced_while_it_is_read_is_not_called_damaged(
    mine, tiny_info, tiny_training_state, raises_one_line, load
) -> None:
    found = read_checkpoint(mine)
    later = found.info.training.model_copy(update={"step": found.info.training.step + 1})
    other = tiny_training_state.values | {"step": later.step}
    save_checkpoint(
        mine,
        PixelModel(tiny_info.model),
        tiny_info.model_copy(update={"training": later}),
        TrainingState(tiny_training_state.tensors, other),
    )
    with raises_one_line(CheckpointError, str(mine), "replaced while it was read; try again"):
        load(found)


@pytest.mark.slow
def test_a_checkpoint_is_read_while_a_run_keeps_replacing_it(tmp_path, build_tiny_model, tiny_info) -> None:
    models, stop = [build_tiny_model(seed) for seed in (0, 1)], threading.Event()

    def save(step: int) -> None:
        training = tiny_info.training.model_copy(update={"step": step})
        save_checkpoint(tmp_path / "last", models[step % 2], tiny_info.model_copy(update={"training": training}))

    def keep_saving() -> None:
        for step in itertools.takewhile(lambda _: not stop.is_set(), itertools.count(1)):
            save(step)

    save(0)
    with ThreadPoolExecutor(1) as pool:
        saving = pool.submit(keep_saving)
        try:
            for _ in range(100):
                found, model = open_checkpoint(tmp_path / "last")
                assert equal_weights(model, models[found.info.training.step % 2])
        finally:
            stop.set()
        saving.result()


def test_a_new_checkpoint_does_not_replace_another(tmp_path, build_tiny_model, tiny_info, raises_one_line) -> None:
    save_checkpoint(tmp_path / "out", build_tiny_model(), tiny_info, new=True)
    with raises_one_line(CheckpointError, "the older checkpoint is untouched"):
        save_checkpoint(tmp_path / "out", build_tiny_model(seed=1), tiny_info, new=True)
    assert equal_weights(load_model(tmp_path / "out"), build_tiny_model())
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_one_of_several_processes_that_save_a_new_checkpoint_at_once_succeeds(tmp_path, build_tiny_model, tiny_info):
    models = [build_tiny_model(seed=seed) for seed in range(3)]
    barrier = threading.Barrier(len(models))

    def save(place: Path, model: Any) -> str:
        barrier.wait(timeout=60)
        try:
            save_checkpoint(place, model, tiny_info, new=True)
        except CheckpointError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(len(models)) as pool:
        for number in range(10):
            place = tmp_path / str(number)
            errors = list(pool.map(save, [place] * len(models), models))
            assert errors.count("") == 1, errors
            assert all("the older checkpoint is untouched" in error for error in errors if error), errors
            assert equal_weights(load_model(place), models[errors.index("")])
    assert sorted(path.name for path in tmp_path.iterdir()) == [str(number) for number in range(10)]


def test_a_config_that_is_truncated_or_has_other_contents_is_refused(mine, raises_one_line) -> None:
    whole = (mine / CONFIG).read_bytes().rstrip()
    truncated = [whole[:kept] for kept in (0, 1, len(whole) // 2, len(whole) - 1)]
    for wrong in (*truncated, b"[]", b"3", b"null", b"{}", b'{"format": 1}', b"\xff"):
        (mine / CONFIG).write_bytes(wrong)
        with raises_one_line(CheckpointError, CONFIG, "damaged"):
            read_checkpoint(mine)


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (lambda document: document["model"].update(layers="three"), ("model.layers",)),
        (lambda document: document["model"].update(layer=3), ("'layer'", "did you mean 'layers'?")),
        (lambda document: document["training"]["settings"].update(step=3), ("'step'", "did you mean 'steps'?")),
        (lambda document: document.update(weight_sha256="0"), ("did you mean 'weights_sha256'?",)),
    ],
)
def test_an_error_in_the_config_is_named(mine, raises_one_line, change, parts) -> None:
    edit_config(mine, change)
    with raises_one_line(CheckpointError, CONFIG, "damaged", *parts):
        read_checkpoint(mine)


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (lambda model: model.update(attention="linaer"), ("unknown attention 'linaer'", "'linear'")),
        (lambda model: model["attention_options"].update(chunks=3), ("'chunks'", "did you mean 'chunk'?")),
    ],
)
def test_an_attention_that_this_version_lacks_is_named(mine, raises_one_line, change, parts) -> None:
    edit_config(mine, lambda document: change(document["model"]))
    with raises_one_line(CheckpointError, CONFIG, *parts):
        load_model(mine)


def test_a_newer_format_is_refused_before_its_unknown_keys_are(mine, raises_one_line) -> None:
    edit_config(mine, lambda document: document.update(format=2, brand_new=1))
    with raises_one_line(CheckpointError, str(mine), "newer", "format 2", "up to 1"):
        read_checkpoint(mine)


# Shipped models


@pytest.mark.parametrize("name", shipped_checkpoints())
def test_every_shipped_model_can_be_opened(name) -> None:
    assert load_model(name).parameter_count() > 0


# Finding


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_checkpoint: Path) -> Path:
    """A folder with two shipped models, and an empty working folder."""
    for name in (DEFAULT_CHECKPOINT, "glyphs-large"):
        shutil.copytree(tiny_checkpoint, tmp_path / "package" / "checkpoints" / name)
    (tmp_path / "package" / "checkpoints" / "not-a-checkpoint").mkdir()
    monkeypatch.setattr(checkpoint_files, "__file__", str(tmp_path / "package" / "checkpoint_files.py"))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "package" / "checkpoints"


def make_run(folder: Path, checkpoint: Path, *names: str) -> Path:
    folder.mkdir()
    (folder / "config.toml").write_text("")
    for name in names:
        shutil.copytree(checkpoint, folder / name)
    return folder


def test_shipped_models_are_found_by_name(shipped) -> None:
    assert shipped_checkpoints() == {name: shipped / name for name in ("glyphs-large", DEFAULT_CHECKPOINT)}
    assert find_checkpoint("glyphs-large") == shipped / "glyphs-large"
    assert find_checkpoint(None) == find_checkpoint() == shipped / DEFAULT_CHECKPOINT


def test_shipped_models_are_found_next_to_the_package_in_the_repository(shipped, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(
        checkpoint_files, "__file__", str(tmp_path / "package" / "linformer_cli" / "checkpoint_files.py")
    )
    assert find_checkpoint("glyphs-large") == shipped / "glyphs-large"
    monkeypatch.setattr(checkpoint_files, "__file__", str(tmp_path / "elsewhere" / "deep" / "checkpoint_files.py"))
    assert shipped_checkpoints() == {}


def test_a_run_stands_for_its_best_checkpoint_or_else_its_last(shipped, tiny_checkpoint) -> None:
    both = make_run(Path("both"), tiny_checkpoint, "best", "last")
    young = make_run(Path("young"), tiny_checkpoint, "last")
    assert find_checkpoint(both) == both / "best"
    assert find_checkpoint("young") == young / "last"
    assert find_checkpoint(both / "last") == both / "last"


def test_a_file_of_a_checkpoint_stands_for_its_folder(shipped, tiny_checkpoint) -> None:
    run = make_run(Path("run"), tiny_checkpoint, "last")
    assert find_checkpoint(run / "last" / WEIGHTS) == find_checkpoint(run / "last" / CONFIG) == run / "last"


def test_the_working_folder_can_be_named_by_a_dot(shipped, tiny_checkpoint, monkeypatch) -> None:
    run = make_run(Path("run"), tiny_checkpoint, "best", "last").resolve()
    monkeypatch.chdir(run)
    assert find_checkpoint(".").resolve() == run / "best"
    monkeypatch.chdir(run / "last")
    assert find_checkpoint(".").resolve() == run / "last"
    assert find_checkpoint("..").resolve() == run / "best"


def test_an_existing_path_wins_over_a_shipped_name_but_not_over_the_default(shipped, tiny_checkpoint) -> None:
    for name in ("glyphs-large", DEFAULT_CHECKPOINT):
        run = make_run(Path(name), tiny_checkpoint, "last")
        assert find_checkpoint(name) == run / "last"
    assert find_checkpoint(None) == shipped / DEFAULT_CHECKPOINT


def test_an_unknown_name_is_refused_with_a_suggestion(shipped, raises_one_line) -> None:
    with raises_one_line(UsageError, "unknown checkpoint 'glyph-large'", "did you mean 'glyphs-large'?"):
        find_checkpoint("glyph-large")


def test_a_path_that_does_not_exist_is_not_mistaken_for_a_name(shipped, raises_one_line) -> None:
    for name in ("runs/first", "model.safetensors", "first.pt"):
        with raises_one_line(CheckpointError, f"no checkpoint at '{name}'", "glyphs-large"):
            find_checkpoint(name)


def test_a_folder_without_a_checkpoint_is_refused(shipped, raises_one_line, tiny_checkpoint) -> None:
    make_run(Path("run"), tiny_checkpoint)
    with raises_one_line(CheckpointError, "'run' holds no checkpoint", "best/ or last/"):
        find_checkpoint("run")


# Crashes and full disks


class Fault:
    """Counts the disk operations of saving a checkpoint, and fails at one of them.

    A failing write has written half of its data, and an interrupted removal has removed one file.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: BaseException | None, at: int = -1) -> None:
        self.error, self.at, self.places = error, at, []
        for owner, name in ((os, "fsync"), (os, "rename"), (Path, "mkdir")):
            monkeypatch.setattr(owner, name, self.wrap(name, getattr(owner, name)))
        monkeypatch.setattr(files_module, "open", self.open, raising=False)
        self.remove = shutil.rmtree
        monkeypatch.setattr(checkpoint_files.shutil, "rmtree", self.rmtree)

    def due(self, place: str) -> bool:
        self.places.append(place)
        return len(self.places) - 1 == self.at

    def wrap(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **options: Any) -> Any:
            if self.due(name):
                raise self.error
            return call(*arguments, **options)

        return wrapped

    def open(self, file: Path, mode: str = "r", **options: Any) -> Any:
        opened = builtins.open(file, mode, **options)  # noqa: SIM115
        if "r" in mode:
            return opened
        fault, write = self, opened.write

        class Writer:
            def __enter__(self) -> Any:
                return self

            def __exit__(self, *_reason: object) -> None:
                opened.close()

            def __getattr__(self, name: str) -> Any:
                return getattr(opened, name)

            def write(self, data: Any) -> Any:
                if fault.due("write"):
                    write(data[: len(data) // 2])
                    raise fault.error
                return write(data)

        return Writer()

    def rmtree(self, folder: Path, ignore_errors: bool = False) -> None:
        # Removals ignore errors, so only an interruption can leave files.
        if isinstance(self.error, KeyboardInterrupt) and folder.exists() and self.due("rmtree"):
            next(file for file in sorted(folder.iterdir()) if file.name in (CONFIG, WEIGHTS)).unlink()
            raise self.error
        self.remove(folder, ignore_errors=ignore_errors)


def loaded_seed(folder: Path, models: list[PixelModel]) -> int:
    """Return the number of the model in a folder, and check that weights and training state belong together."""
    found = find_checkpoint(folder)
    model, state = load_model(found), load_training_state(read_checkpoint(found))
    (seed,) = [index for index, candidate in enumerate(models) if equal_weights(model, candidate)]
    assert state.values["seed"] == seed
    return seed


@pytest.mark.parametrize(
    ("kind", "cut_off_before"),
    first_fast([(OSError, False), (KeyboardInterrupt, True), (OSError, True), (KeyboardInterrupt, False)], count=2),
)
def test_a_save_that_stops_anywhere_leaves_the_old_or_the_new_checkpoint_complete(
    tmp_path, build_tiny_model, tiny_info, tiny_training_state, raises_one_line, kind, cut_off_before
) -> None:
    models = [build_tiny_model(seed) for seed in (0, 1)]
    error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) if kind is OSError else KeyboardInterrupt()

    def save(run: Path, seed: int) -> None:
        state = TrainingState(tiny_training_state.tensors, {"seed": seed})
        save_checkpoint(run / "last", models[seed], tiny_info, state)

    def begin(name: str) -> Path:
        save(tmp_path / name, 0)
        if cut_off_before:  # the machine stopped between the two renames of an earlier save
            (tmp_path / name / "last").rename(tmp_path / name / ".last.replaced")
        return tmp_path / name

    run = begin("counted")
    with pytest.MonkeyPatch.context() as monkeypatch:
        places = Fault(monkeypatch, error).places
        save(run, 1)
    # A save writes and flushes four files, flushes two folders and renames two folders. If `Fault` counted
    # fewer operations, this test would not make all of them fail.
    expected = [4, 6, 1 if cut_off_before else 2]
    assert [places.count(name) for name in ("write", "fsync", "rename")] == expected
    outcomes = []
    for at in range(len(places)):
        run = begin(str(at))
        with pytest.MonkeyPatch.context() as monkeypatch:
            Fault(monkeypatch, error, at)
            if kind is OSError:
                with raises_one_line(CheckpointError, str(run / "last"), "No space left on device"):
                    save(run, 1)
                assert not list(run.glob(TEMPORARY_FILES))
            else:
                with pytest.raises(KeyboardInterrupt):
                    save(run, 1)
        outcomes.append(loaded_seed(run, models))
        assert outcomes[-1] == loaded_seed(run / "last", models)
        save(run, 1)
        assert loaded_seed(run, models) == 1
        assert [path.name for path in run.iterdir()] == ["last"]
    # The old checkpoint is found until the last rename; afterwards, the new one is found.
    assert outcomes == sorted(outcomes)
    assert set(outcomes) == {0, 1}


@pytest.mark.parametrize("kind", [OSError, KeyboardInterrupt])
def test_a_first_save_that_fails_leaves_no_checkpoint(tmp_path, build_tiny_model, tiny_info, kind) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        places = Fault(monkeypatch, None).places
        save_checkpoint(tmp_path / "counted" / "last", build_tiny_model(), tiny_info)
    renamed = places.index("rename")
    for at in range(renamed + 1):
        run = tmp_path / str(at)
        with pytest.MonkeyPatch.context() as monkeypatch:
            Fault(monkeypatch, kind(errno.ENOSPC, "full"), at)
            said = "nothing was saved" if kind is OSError else None
            with pytest.raises(CheckpointError if kind is OSError else KeyboardInterrupt, match=said):
                save_checkpoint(run / "last", build_tiny_model(), tiny_info)
        run.mkdir(exist_ok=True)
        with pytest.raises(CheckpointError, match="holds no checkpoint"):
            find_checkpoint(run)
        save_checkpoint(run / "last", build_tiny_model(), tiny_info)
        assert [path.name for path in run.iterdir()] == ["last"]


def test_a_save_stopped_between_its_renames_is_found_and_repaired(
    tmp_path, build_tiny_model, tiny_info, tiny_checkpoint
):
    run = make_run(tmp_path / "run", tiny_checkpoint, "last")
    (run / "last").rename(run / ".last.replaced")
    shutil.copytree(tiny_checkpoint, killed_write(run))
    for name in (run, run / "last", str(run / "last")):
        assert equal_weights(load_model(name), build_tiny_model())
    save_checkpoint(run / "last", build_tiny_model(seed=1), tiny_info)
    assert {path.name for path in run.iterdir()} == {"config.toml", "last"}
    assert equal_weights(load_model(run), build_tiny_model(seed=1))


def test_an_unwritable_path_is_named(tmp_path, build_tiny_model, tiny_info, raises_one_line) -> None:
    (tmp_path / "file").write_text("in the way")
    with raises_one_line(CheckpointError, "cannot save", str(tmp_path / "file" / "last")):
        save_checkpoint(tmp_path / "file" / "last", build_tiny_model(), tiny_info)
    assert (tmp_path / "file").read_text() == "in the way"


@pytest.mark.parametrize("key", ["width", "feed_forward", "layers", "heads", "head_width", "mixtures"])
def test_a_damaged_size_takes_no_memory(tiny_checkpoint, tmp_path, raises_one_line, key) -> None:
    for value, message in ((1024, WEIGHTS), (10**9, CONFIG)):
        assert_takes_no_memory(tiny_checkpoint, tmp_path / "copy", {key: value}, raises_one_line, message)


@pytest.mark.parametrize(
    ("attention", "option"),
    [("performer", "features"), ("nystrom", "landmarks"), ("rfa", "frequencies"), ("linear", "features")],
)
def test_a_damaged_option_takes_no_memory(tiny_checkpoint, tmp_path, raises_one_line, attention, option) -> None:
    options = {option: 2**23} | ({"feature_map": "learned"} if attention == "linear" else {})
    changes = {"attention": attention, "attention_options": options}
    assert_takes_no_memory(tiny_checkpoint, tmp_path, changes, raises_one_line, WEIGHTS)


def assert_takes_no_memory(checkpoint, copy, changes, raises_one_line, message) -> None:
    shutil.copytree(checkpoint, copy, dirs_exist_ok=True)
    document = json.loads((checkpoint / CONFIG).read_text())
    document["model"] |= {"head": "mixture", **changes}
    del document["config_sha256"]
    (copy / CONFIG).write_text(json.dumps(document))
    before = measure_peak_memory()
    with raises_one_line(CheckpointError, message):
        load_model(copy)
    assert measure_peak_memory() - before < 200 * 2**20
