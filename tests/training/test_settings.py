"""Tests of settings: options override the file, the file overrides the preset, and errors take one line."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from loops import loop_over

from linformer_cli.checkpoint import read_checkpoint, save_checkpoint
from linformer_cli.config import DEFAULT_EPOCHS, ImageShape, Origin, RunConfig, TrainConfig
from linformer_cli.errors import CheckpointError, UsageError
from linformer_cli.presets import DEFAULT_PRESET, PRESETS
from linformer_cli.training.run_folder import RunFolder
from linformer_cli.training.settings import Given, Pictures, extend_settings, find_source, merge_settings

IMAGE = ImageShape(height=8, width=8)


@pytest.fixture
def write(tmp_path: Path):
    def write_file(text: str) -> Path:
        (tmp_path / "mine.toml").write_text(text)
        return tmp_path / "mine.toml"

    return write_file


def build(file: Path | None = None, preset: str | None = None, **flags: dict[str, Any]) -> RunConfig:
    tables = {table: flags.get(table, {}) for table in ("model", "data", "train")}
    return merge_settings(Given(preset, **tables), file).build(IMAGE)


# Precedence


def test_without_settings_the_default_preset_and_length_are_used() -> None:
    config = build()
    assert config.preset == DEFAULT_PRESET
    assert config.model.layers == PRESETS[DEFAULT_PRESET].layers
    assert config.train == TrainConfig(epochs=DEFAULT_EPOCHS, optimizer="muon", learning_rate=0.008)
    assert config.model.image == IMAGE


def test_an_option_overrides_the_file_the_preset_and_the_default_in_this_order(write) -> None:
    assert PRESETS["tiny"].layers == 2
    file = write(
        'preset = "tiny"\n[model]\nlayers = 5\nheads = 3\n[train]\nbatch = 7\nseed = 1\n[data]\nname = "glyphs"'
    )
    assert build(preset="tiny").model.layers == 2
    config = build(file)
    assert (config.preset, config.model.layers, config.model.heads, config.model.width) == ("tiny", 5, 3, 32)
    assert (config.train.batch, config.train.seed, config.train.warmup_steps) == (7, 1, 100)
    assert (config.data.name, config.data.image_size) == ("glyphs", None)
    config = build(file, model={"layers": 6}, train={"batch": 8}, data={"image_size": 9})
    assert (config.model.layers, config.model.heads, config.train.batch, config.train.seed) == (6, 3, 8, 1)
    assert (config.data.name, config.data.image_size) == ("glyphs", (9, 9))
    assert build(file, data={"name": "mnist"}).data.name == "mnist"


def test_muon_has_its_own_default_learning_rate(write) -> None:
    assert build(preset="mnist-small").train.learning_rate == 0.002
    assert build(preset="mnist-small", train={"optimizer": "muon"}).train.learning_rate == 0.008
    assert build(write('[train]\noptimizer = "muon"'), "tiny").train.learning_rate == 0.008
    assert build(preset="tiny", train={"optimizer": "muon", "learning_rate": 0.1}).train.learning_rate == 0.1
    assert build(train={"optimizer": "adamw"}).train.learning_rate == 0.002
    # The paper's presets set a learning rate, and another optimizer does not change it.
    assert build(preset="mnist-paper", train={"optimizer": "muon"}).train.learning_rate == 1e-4


def test_a_preset_may_have_training_settings(write) -> None:
    config = build(preset="mnist-paper", train={"steps": 5})
    assert config.train.optimizer == "radam"
    assert config.train.learning_rate == 1e-4
    file = write('preset = "mnist-paper"\n[train]\nlearning_rate = 0.5')
    assert build(file, train={"optimizer": "adamw"}).train.learning_rate == 0.5
    assert build(file, train={"optimizer": "adamw"}).train.optimizer == "adamw"
    assert build(file, "tiny").train.optimizer == "adamw"


def test_data_sets_have_default_presets() -> None:
    chosen = {name: merge_settings(Given(data={"name": name})).preset for name in ("mnist", "cifar10", "bytes:x")}
    assert chosen == {"mnist": "mnist-wide", "cifar10": "colour-pixel", "bytes:x": "bytes-small"}
    assert merge_settings(Given(data={"name": "cifar10"}), images_preset="tiny").preset == "tiny"


def test_files_may_have_the_old_name_of_a_preset(write) -> None:
    file = write('preset = "cifar10-pixel"')
    shipped = merge_settings(Given(), source=find_source("cifar10-pixel", None))
    for settings in (merge_settings(Given(), file), shipped):
        assert (settings.preset, settings.train.batch) == ("colour-pixel", 8)
    assert shipped.network.width == 256


@pytest.mark.parametrize(("preset", "name"), [(None, "mnist"), ("tiny", "mnist"), ("cifar10-paper", "cifar10")])
def test_a_preset_has_a_default_data_set(preset, name) -> None:
    assert merge_settings(Given(preset, data={"data_dir": "/somewhere"})).data.name == name
    assert merge_settings(Given(preset, data={"name": "glyphs"})).data.name == "glyphs"


# Lengths


def test_a_length_option_replaces_the_length_in_the_file(write) -> None:
    file = write("[train]\nepochs = 2.5\nbatch = 7")
    assert build(file).train.epochs == 2.5
    for name, value in (("steps", 9), ("max_time", 60.0), ("epochs", 1.0)):
        train = build(file, train={name: value}).train
        given = {key: getattr(train, key) for key in ("steps", "epochs", "max_time") if getattr(train, key) is not None}
        assert given == {name: value}
        assert train.batch == 7


def test_steps_and_epochs_in_one_place_are_refused(write, raises_one_line) -> None:
    with raises_one_line(UsageError, "set the length by steps or epochs, by max_time, or by both"):
        build(train={"steps": 3, "epochs": 1.0})
    file = write("[train]\nsteps = 3\nepochs = 9")
    with raises_one_line(UsageError, "set the length by steps or epochs, by max_time, or by both"):
        build(file)
    assert build(file, train={"steps": 4}).train.steps == 4


# Attention options


def test_changing_the_mechanism_drops_the_attention_options(write) -> None:
    file = write('[model]\nattention = "linear"\nattention_options = {feature_map = "relu", chunk = 32}')
    assert build(file).model.attention_options == {"feature_map": "relu", "chunk": 32}
    assert build(file, model={"attention": "softmax"}).model.attention_options == {}
    kept = build(file, model={"attention": "linear", "attention_options": {"chunk": 8}})
    assert kept.model.attention_options == {"feature_map": "relu", "chunk": 8}
    file = write('[model]\nattention = "softmax"')
    changed = build(file, model={"attention": "linear", "attention_options": {"chunk": 8}})
    assert changed.model.attention_options == {"feature_map": "elu", "chunk": 8}


def test_attention_options_are_checked_and_their_defaults_are_filled_in(raises_one_line) -> None:
    assert build().model.attention_options == {"feature_map": "elu", "chunk": 64}
    # Values from the command line are text.
    assert build(model={"attention_options": {"chunk": "8"}}).model.attention_options["chunk"] == 8
    with raises_one_line(UsageError, "'linear'", "'chunks'", "did you mean 'chunk'?"):
        build(model={"attention_options": {"chunks": 8}})
    with raises_one_line(UsageError, "unknown attention 'sofmax'", "did you mean 'softmax'?"):
        build(model={"attention": "sofmax"})
    with raises_one_line(UsageError, "'softmax'", "'chunk'"):
        build(model={"attention": "softmax", "attention_options": {"chunk": 8}})


# The config.toml of a run


def test_the_configuration_of_a_run_can_start_another_run(write, tmp_path: Path) -> None:
    first = build(write('preset = "tiny"\n[model]\nlayers = 3'), train={"steps": 5}, data={"name": "glyphs"})
    RunFolder(tmp_path / "run").create(first)
    file = tmp_path / "run" / "config.toml"
    assert build(file) == first
    larger = ImageShape(height=14, width=12, channels=3)
    again = merge_settings(Given(train={"epochs": 1.0}), file).build(larger)
    assert again.model.image == larger
    assert again.model.layers == 3
    assert (again.train.steps, again.train.epochs) == (None, 1.0)


# Errors


@loop_over(
    ("text", "parts"),
    [
        ("[modle]\nlayers = 3", ("mine.toml", "'modle'", "did you mean 'model'?")),
        ("presets = 'tiny'", ("mine.toml", "'presets'", "did you mean 'preset'?")),
        ("[model]\nlayer = 3", ("model", "'layer'", "did you mean 'layers'?")),
        ("[train]\nlearning_rates = 3", ("train", "did you mean 'learning_rate'?")),
        ("[data]\nnames = 'mnist'", ("data", "did you mean 'name'?")),
        ("preset = 'tyni'", ("unknown preset 'tyni'", "did you mean 'tiny'?")),
        ("preset = 3", ("mine.toml", "preset must be a name")),
        ("model = 3", ("mine.toml", "[model] must be a table")),
        ("[[train]]\nsteps = 3", ("mine.toml", "[train] must be a table")),
        ("[model]\nattention_options = 'elu'", ("attention_options", "'elu'")),
        ("[model]\nlayers = 'three'", ("model: layers: ", "'three'")),
        ('[train]\noptimizer = ["muon"]', ("train", "optimizer", "['muon']")),
        ('[model]\nattention = ["linear"]', ("model", "attention", "['linear']")),
        ('[data]\nname = ["mnist"]', ("data", "name", "['mnist']")),
        ("[model\nlayers = 3", ("mine.toml", "TOML", "line 1")),
    ],
)
def test_an_error_in_the_file_gives_a_one_line_error(write, raises_one_line, text, parts) -> None:
    file = write(text)
    with raises_one_line(UsageError, *parts):
        build(file)


def test_a_missing_or_unreadable_file_gives_a_one_line_error(tmp_path: Path, raises_one_line) -> None:
    with raises_one_line(UsageError, "no configuration at", "missing.toml"):
        build(tmp_path / "missing.toml")
    with raises_one_line(UsageError, str(tmp_path), "not a readable TOML file"):
        build(tmp_path)
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    with raises_one_line(UsageError, "binary.toml", "not a readable TOML file"):
        build(tmp_path / "binary.toml")


# Resuming a run


def test_a_resumed_run_may_change_length_device_precision_and_data_folder() -> None:
    config = build(preset="tiny", train={"steps": 5, "batch": 3, "device": "cpu"})
    longer = extend_settings(
        config,
        Given(data={"data_dir": "elsewhere"}, train={"max_time": 60.0, "device": "auto", "precision": "bf16"}),
    )
    assert (longer.train.steps, longer.train.epochs, longer.train.max_time) == (None, None, 60.0)
    assert (longer.train.batch, longer.train.device, longer.data.data_dir) == (3, "auto", "elsewhere")
    assert longer.train.precision == "bf16"
    assert longer.model == config.model
    assert extend_settings(config, Given()) == config


@loop_over(
    ("given", "others", "flag"),
    [
        (Given(train={"learning_rate": 0.1}), (), "--learning-rate"),
        (Given(model={"layers": 3}), (), "--layers"),
        (Given(model={"attention_options": {"chunk": 8}}), (), "--attention-option"),
        (Given(data={"name": "mnist"}), (), "--data"),
        (Given(data={"labels": False}), (), "--classes"),
        (Given("tiny"), (), "--preset"),
        (Given(), ("init_from",), "--init-from"),
    ],
)
def test_a_resumed_run_may_not_change_other_settings(given, others, flag, raises_one_line) -> None:
    longer = replace(given, train={**given.train, "steps": 6})
    with raises_one_line(UsageError, f"drop {flag} or start a new run"):
        extend_settings(build(preset="tiny", train={"steps": 5}), longer, others)


# Starting from a checkpoint


@pytest.fixture
def source(tmp_path: Path, build_tiny_model, tiny_info):
    save_checkpoint(tmp_path / "source", build_tiny_model(), tiny_info)
    return read_checkpoint(tmp_path / "source")


def build_from(source, file: Path | None = None, preset: str | None = None, **flags: dict[str, Any]) -> RunConfig:
    tables = {table: flags.get(table, {}) for table in ("model", "data", "train")}
    return merge_settings(Given(preset, **tables), file, source).build(source.info.model.image)


def test_network_and_data_default_to_the_source(source) -> None:
    config = build_from(source)
    assert config.model.model_dump(exclude={"attention_options"}) == source.info.model.model_dump(
        exclude={"attention_options"}
    )
    assert config.model.attention_options["chunk"] == 16
    assert (config.data.name, config.data.image_size) == ("glyphs", (8, 8))
    assert config.init_from == Origin(
        checkpoint=str(source.path), weights_sha256=source.digest, attention="linear", step=3
    )
    assert merge_settings(Given()).build(IMAGE).init_from is None


def test_a_preset_overrides_the_source_and_the_file_overrides_both(source, write) -> None:
    assert build_from(source, preset="tiny").model.feed_forward == PRESETS["tiny"].feed_forward
    file = write('preset = "tiny"\n[model]\nheads = 3\n[data]\nname = "mnist"')
    config = build_from(source, file)
    assert (config.model.heads, config.model.feed_forward) == (3, PRESETS["tiny"].feed_forward)
    assert (config.data.name, config.data.image_size) == ("mnist", None)


def test_images_may_have_another_shape_but_bytes_are_refused(source, raises_one_line) -> None:
    settings = merge_settings(Given(data={"name": "mnist"}), None, source)
    assert settings.build(ImageShape(height=28, width=28)).model.image.width == 28
    with raises_one_line(UsageError, "8 x 8 x 1 with 16 levels", "1 x 64 x 1 with 256 levels", "--data"):
        settings.build(ImageShape(height=1, width=64))


def test_a_folder_of_pictures_chooses_its_settings() -> None:
    given = Given(data={"name": "folder:x"})
    for channels, classes, preset in ((1, 0, "mnist-wide"), (3, 5, "colour-pixel"), (4, 0, "colour-pixel")):
        pictures = Pictures(ImageShape(height=8, width=8, channels=channels), classes, 999 + classes)
        chosen = merge_settings(given, pictures=pictures)
        assert (chosen.preset, chosen.data.labels) == (preset, classes > 0)
        train = chosen.train
        assert (train.max_time, train.epochs, train.patience, train.flip) == (900, 8, 3, False)
        assert (train.hide_class, train.weight_decay) == ((0.2, 0.05) if classes else (0, 0.5))
        chosen.build(pictures.shape, classes)
    asked = merge_settings(
        replace(given, preset="tiny", train={"epochs": 2, "flip": True, "save_every": 9}), pictures=pictures
    )
    assert (asked.preset, asked.train.max_time, asked.train.check_every) == ("tiny", None, None)
    assert asked.train.flip and asked.train.epochs == 2
    timed = merge_settings(replace(given, train={"max_time": 60.0}), pictures=pictures).train
    assert (timed.max_time, timed.epochs) == (60, 8)


def test_the_config_of_a_run_names_its_source(source, tmp_path, raises_one_line) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.create(build_from(source))
    assert folder.read_config().init_from == build_from(source).init_from
    found = find_source(None, folder.config_file)
    assert found == source
    assert build_from(found, folder.config_file) == build_from(source)
    assert find_source(None, None) is None
    text = folder.config_file.read_text()
    folder.config_file.write_text(text.replace(source.digest, "0" * 64))
    with raises_one_line(CheckpointError, "no longer has the weights", "--init-from"):
        find_source(None, folder.config_file)
    assert find_source(str(source.path), folder.config_file) == source
