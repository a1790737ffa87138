"""From preset, file and flags to one resolved configuration: flag over file over preset over default."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from linformer_cli.checkpoint import Checkpoint, read_checkpoint
from linformer_cli.config import (
    DataConfig,
    ImageShape,
    InitFrom,
    ModelConfig,
    NetworkConfig,
    RunConfig,
    TrainConfig,
    parse_config,
)
from linformer_cli.data.images import fit_size
from linformer_cli.errors import CheckpointError, UsageError, unknown_name
from linformer_cli.model.catalogue import parse_options
from linformer_cli.presets import LEARNING_RATES, RECIPES, find_preset, find_preset_data

DEFAULT_PRESET = "mnist-wide"
DEFAULT_EPOCHS = 3.0
LENGTHS = ("steps", "epochs", "max_time")
_TABLES = ("model", "data", "train")
_INIT_FROM = "init_from"
# What of a model's configuration the data decide.
_OF_THE_DATA = {"image", "classes"}


@dataclass(frozen=True)
class Settings:
    """The layers merged, before the images are known. `model`, `data` and `train` are plain values.

    `source` is the checkpoint whose weights the run begins with.
    """

    preset: str
    model: dict[str, Any]
    data: dict[str, Any]
    train: dict[str, Any]
    source: Checkpoint | None = None

    @property
    def data_config(self) -> DataConfig:
        return parse_config(DataConfig, self.data, "data")

    def check(self) -> None:
        """Raise `UsageError` for what is wrong whatever the images are: reading them may take long."""
        self._parse_network()
        parse_config(TrainConfig, self.train, "train")

    def build(self, image: ImageShape, classes: int = 0) -> RunConfig:
        """The whole configuration for images of this shape, attention options filled in and checked.

        The model has the images' `classes` where `[data] labels` asks for it; raises `UsageError` where there are none.
        """
        if self.source is not None and image != self.source.info.model.image:
            raise UsageError(
                f"'{self.source.path}' draws images of {_describe_shape(self.source.info.model.image)}, "
                f"'{self.data_config.name}' has {_describe_shape(image)}; choose --data or --image-size to fit"
            )
        if self.data_config.labels and not classes:
            raise UsageError(
                f"--classes needs images with labels, and '{self.data_config.name}' has none; give --no-classes"
            )
        known = {"image": image.model_dump(), "classes": classes if self.data_config.labels else 0}
        model = parse_config(ModelConfig, {**self._parse_network(), **known}, "model")
        tables = {"model": model.model_dump(), "data": self.data, "train": self.train}
        start = None if self.source is None else describe_source(self.source).model_dump()
        return parse_config(RunConfig, {"preset": self.preset, "init_from": start, **tables}, "run")

    def _parse_network(self) -> dict[str, Any]:
        """The network's plain values, every option of its attention filled in."""
        network = parse_config(NetworkConfig, self.model, "model")
        options = parse_options(network.attention, network.attention_options).model_dump(exclude_none=True)
        return {**network.model_dump(), "attention_options": options}


def describe_source(source: Checkpoint) -> InitFrom:
    """What a run keeps about the checkpoint that it began with."""
    info = source.info
    return InitFrom(
        checkpoint=str(source.path),
        weights_sha256=info.weights_sha256,
        attention=info.model.attention,
        step=info.training.step,
    )


def find_source(name: str | None, file: Path | None) -> Checkpoint | None:
    """The checkpoint to begin with: `name`, or else the one that `file`, a run's config.toml, says it began with.

    Raises `CheckpointError` where the weights are not those that the file names.
    """
    if name is not None:
        return read_checkpoint(name)
    table = None if file is None else read_tables(file).get(_INIT_FROM)
    if table is None:
        return None
    wanted = parse_config(InitFrom, table, _INIT_FROM)
    source = read_checkpoint(wanted.checkpoint)
    if source.digest != wanted.weights_sha256:
        raise CheckpointError(
            f"'{source.path}' has other weights than '{file}' began with; name them with --init-from, or remove "
            f"[{_INIT_FROM}] from the file"
        )
    return source


def merge_settings(
    file: Path | None,
    preset: str | None,
    model: Mapping[str, Any],
    data: Mapping[str, Any],
    train: Mapping[str, Any],
    source: Checkpoint | None = None,
    default_preset: str = DEFAULT_PRESET,
) -> Settings:
    """Merge what was given on the command line (`preset`, `model`, `data`, `train`: given keys only) over `file`.

    The images are those that the preset is made for, unless others are named. With a `source` to begin with, its
    network and its data stand in for the defaults; a preset that was named wins. Raises `UsageError` for unknown keys
    and names, and for a file that is not TOML.
    """
    document = read_tables(file) if file is not None else {}
    name = preset or document.get("preset")
    data = {**document.get("data", {}), **data}
    if document.get("model", {}).get("classes"):
        data = {"labels": True, **data}
    if source is None:
        name = name or default_preset
        network = find_preset(name).model_dump()
        data = {"name": find_preset_data(name), **data}
    else:
        network = find_preset(name).model_dump() if name else source.info.model.model_dump(exclude=_OF_THE_DATA)
        name = name or source.info.training.preset or DEFAULT_PRESET
        data = {"name": source.info.data.name, "labels": source.info.model.classes > 0, **data}
        data = {**fit_size(str(data["name"]), source.info.model.image), **data}
    from_file = {table: dict(document.get(table, {})) for table in _TABLES}
    # A run's own config.toml can be given again; these come from the data all the same.
    for key in _OF_THE_DATA:
        from_file["model"].pop(key, None)
    merged_model = _merge_model(network, from_file["model"], model)
    lengths = [key for layer in (train, from_file["train"]) for key in LENGTHS if key in layer]
    merged_train = {**RECIPES.get(name, {}), **from_file["train"], **train}
    optimizer = merged_train.get("optimizer")
    if isinstance(optimizer, str) and optimizer in LEARNING_RATES:  # a file can hold anything
        merged_train.setdefault("learning_rate", LEARNING_RATES[optimizer])
    if any(key in train for key in LENGTHS):
        for key in LENGTHS:
            if key not in train:
                merged_train.pop(key, None)
    if not lengths:
        merged_train["epochs"] = DEFAULT_EPOCHS
    return Settings(name, merged_model, data, merged_train, source)


def extend_settings(
    config: RunConfig, train: Mapping[str, Any], changed: Mapping[str, Any], data_dir: str | None
) -> RunConfig:
    """A resumed run's configuration: another length, device, precision or data folder is all that may change.

    `train` and `changed` are what was given on the command line for training and for all else; raises `UsageError`
    where that would make another run of it.
    """
    refused = [*changed, *(key for key in train if key not in (*LENGTHS, "device", "precision"))]
    if refused:
        flag = "--" + refused[0].replace("_", "-")
        raise UsageError(f"--resume goes on with the run's own settings; drop {flag} or start a new run")
    settings = config.train.model_dump()
    if any(key in train for key in LENGTHS):
        settings |= dict.fromkeys(LENGTHS)
    data = config.data if data_dir is None else config.data.model_copy(update={"data_dir": data_dir})
    return config.model_copy(update={"data": data, "train": parse_config(TrainConfig, {**settings, **train}, "train")})


def _merge_model(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Later layers win. Attention options belong to their mechanism and go when it is replaced."""
    merged: dict[str, Any] = {}
    for layer in layers:
        given = layer.get("attention_options", {})
        if not isinstance(given, Mapping):
            raise UsageError(f"model: attention_options must be a table, found {given!r}")
        options = dict(merged.get("attention_options", {}))
        if "attention" in layer and layer["attention"] != merged.get("attention"):
            options = {}
        merged = {**merged, **layer, "attention_options": {**options, **given}}
    return merged


def read_tables(file: Path) -> dict[str, Any]:
    """What a file of settings says, its values not yet checked; raises `UsageError` where it is none."""
    try:
        document = tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"no configuration at '{file}'") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"'{file}' is not a readable TOML file: {error}") from None
    for key in document:
        if key not in ("preset", _INIT_FROM, *_TABLES):
            raise unknown_name(f"key in {file}", key, ("preset", _INIT_FROM, *_TABLES))
    for table in (_INIT_FROM, *_TABLES):
        if not isinstance(document.get(table, {}), dict):
            raise UsageError(f"'{file}': [{table}] must be a table")
    if not isinstance(document.get("preset", ""), str):
        raise UsageError(f"'{file}': preset must be a name")
    return document


def _describe_shape(image: ImageShape) -> str:
    return f"{image.height} x {image.width} x {image.channels} with {image.levels} levels"
