"""Merge settings into one configuration. Priority: command line, file, preset, default."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from linformer_cli.checkpoint import Checkpoint, read_checkpoint, reopen_checkpoint
from linformer_cli.config import (
    DEFAULT_EPOCHS,
    LENGTHS,
    LOOK_SETTINGS,
    DataConfig,
    ImageShape,
    ModelConfig,
    NetworkConfig,
    Origin,
    RunConfig,
    TrainConfig,
    holds_bytes,
)
from linformer_cli.data.look import Look
from linformer_cli.documents import parse_config, read_toml
from linformer_cli.errors import UsageError, shorten, unknown_name
from linformer_cli.model.mixers import check_parts, parse_options
from linformer_cli.presets import (
    COLOUR_PRESET,
    DEFAULT_PRESET,
    FOLDER_HIDE_CLASS,
    FOLDER_RECIPE,
    RECIPES,
    RENAMED_PRESETS,
    SCARCE_PICTURES,
    SCARCE_WEIGHT_DECAY,
    complete_recipe,
    find_default_preset,
    find_preset,
    find_preset_data,
)
from linformer_cli.units import WINDOWS

_TABLES = ("model", "data", "train")
_INIT_FROM, _DISTILL_FROM = "init_from", "distill_from"
# The keys of a model's configuration that data and training determine.
_DERIVED = {"image", "classes", "optional_class"}
# A resumed run may change these settings, its length and its data folder.
_FREE = ("device", "precision", "patience", "graph")
# Options whose names differ from their keys.
_FLAGS = {"name": "data", "labels": "classes", "attention_options": "attention_option"}


@dataclass(frozen=True)
class Given:
    """The settings given on a command line: a preset, and the given keys of each table."""

    preset: str | None = None
    model: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    train: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Settings:
    """The merged, checked settings of a run before its images are known. It starts from `source`, if any."""

    preset: str
    network: NetworkConfig
    data: DataConfig
    train: TrainConfig
    source: Checkpoint | None = None

    @property
    def look(self) -> Look | None:
        """The look of the source's images, unless the settings change it. The data set's own classes are numbered."""
        if self.source is None or any(getattr(self.data, key) is not None for key in (*LOOK_SETTINGS, "length")):
            return None
        return replace(Look.of(self.source.info), class_names=())

    def build(self, image: ImageShape, classes: int = 0, teachers: Sequence[Checkpoint] = ()) -> RunConfig:
        """Return the whole configuration for images of this shape, with `classes` if `[data] labels` is set.

        Raises `UsageError` if there are none then, and for `teachers` that the model cannot learn from.
        """
        own = image if self.source is None else self.source.info.model.image
        if self.source is not None and own != image and WINDOWS in (own.words, image.words):
            found = f"'{self.data.name}' has {_describe_shape(image)}; choose --data or --length to fit"
            raise UsageError(f"'{self.source.path}' draws images of {_describe_shape(own)}, but {found}")
        if self.data.labels and not classes:
            raise UsageError(f"--classes needs images with labels, and '{self.data.name}' has none; give --no-classes")
        classes = classes if self.data.labels else 0
        known = {"image": image, "classes": classes, "optional_class": classes > 0 and self.train.hide_class > 0}
        model = parse_config(ModelConfig, {**dict(self.network), **known}, "model")
        for teacher in teachers:
            _check_teacher(teacher, model)
        start = None if self.source is None else self.source.origin
        origins = {_INIT_FROM: start, _DISTILL_FROM: [teacher.origin for teacher in teachers]}
        tables = {"model": model, "data": self.data, "train": self.train}
        return parse_config(RunConfig, {"preset": self.preset, **origins, **tables}, "run")


def _parse_network(values: Mapping[str, Any]) -> NetworkConfig:
    network = parse_config(NetworkConfig, values, "model")
    options = parse_options(network.attention, network.attention_options)
    check_parts(network, options)
    return network.model_copy(update={"attention_options": options.model_dump(exclude_none=True)})


def find_source(name: str | None, file: Path | None) -> Checkpoint | None:
    """Find the checkpoint to start from: `name`, or else that in `file` if `file` is a run's config.toml."""
    if name is not None:
        return read_checkpoint(name)
    table = None if file is None else read_tables(file).get(_INIT_FROM)
    return None if table is None else reopen_checkpoint(parse_config(Origin, table, _INIT_FROM))


def find_teachers(names: Sequence[str], file: Path | None) -> list[Checkpoint]:
    """Find the checkpoints to learn from: `names`, or else those in `file` if `file` is a run's config.toml."""
    if names or file is None:
        return [read_checkpoint(name) for name in names]
    tables = read_tables(file).get(_DISTILL_FROM, [])
    return [reopen_checkpoint(parse_config(Origin, table, _DISTILL_FROM)) for table in tables]


def _check_teacher(teacher: Checkpoint, config: ModelConfig) -> None:
    """Raise `UsageError` if a model with this `config` cannot learn from `teacher`."""
    model, start = teacher.info.model, f"--distill-from: '{teacher.path}'"
    if model.image != config.image:
        shapes = f"{_describe_shape(model.image)}, but the run's images are {_describe_shape(config.image)}"
        raise UsageError(f"{start} predicts images of {shapes}")
    if model.classes and config.classes not in (0, model.classes):
        raise UsageError(f"{start} has {model.classes} classes, but the run has {config.classes}")
    if model.required_classes and not config.required_classes:
        raise UsageError(f"{start} needs the class of every image, but the run has images without a class")


@dataclass(frozen=True)
class Pictures:
    """What settings depend on in a folder of pictures: their shape, and the numbers of classes and training images."""

    shape: ImageShape
    classes: int
    count: int


def merge_settings(
    given: Given,
    file: Path | None = None,
    source: Checkpoint | None = None,
    images_preset: str | None = None,
    pictures: Pictures | None = None,
) -> Settings:
    """Merge settings: the command line takes precedence over `file`, and `file` over the preset.

    The data set defaults to the preset's, the preset to that of the data set or, for images, to `images_preset`. With a
    `source`, network (unless a preset is named) and data set default to its own. For the `pictures` of a folder, more
    defaults depend on them. Raises `UsageError` for unknown keys and names, and for a file that is not TOML.
    """
    document = read_tables(file) if file is not None else {}
    recipe: dict[str, Any] = {}
    if pictures is not None:
        images_preset = images_preset or (COLOUR_PRESET if pictures.shape.channels > 1 else DEFAULT_PRESET)
        recipe = dict(FOLDER_RECIPE)
        chosen = {**document.get("train", {}), **given.train}
        if not chosen.keys().isdisjoint(("steps", "epochs")):
            del recipe["epochs"], recipe["max_time"]
        if not chosen.keys().isdisjoint(("evaluate_every", "sample_every", "save_every")):
            del recipe["check_every"]
    name = given.preset or document.get("preset")
    name = RENAMED_PRESETS.get(str(name), name)
    data = {**document.get("data", {}), **given.data}
    if document.get("model", {}).get("classes"):
        data = {"labels": True, **data}
    if source is None:
        if pictures is not None:
            data = {"labels": pictures.classes > 0, **data}
            recipe |= {"hide_class": FOLDER_HIDE_CLASS} if data["labels"] else {}
            recipe |= {"weight_decay": SCARCE_WEIGHT_DECAY} if pictures.count < SCARCE_PICTURES else {}
        if name is None:
            name = find_default_preset(str(data.get("name")), images_preset)
        network = find_preset(name).model_dump()
        data = data if "name" in data else {"name": find_preset_data(name), **data}
    else:
        network = find_preset(name).model_dump() if name else source.info.model.model_dump(exclude=_DERIVED)
        name = name or source.info.training.preset or DEFAULT_PRESET
        name = RENAMED_PRESETS.get(name, name)
        labelled = source.info.model.classes > 0 and (pictures is None or pictures.classes > 0)
        data = {"name": source.info.data.name, "labels": labelled, **data}
        image = source.info.model.image
        if data["name"] == "glyphs":
            data = {"image_size": (image.height, image.width), **data}
        elif holds_bytes(str(data["name"])):
            data = {"length": image.width, **data}
    # A run's own config.toml holds these keys too, but their values come from the data and from other settings.
    from_file = {key: value for key, value in document.get("model", {}).items() if key not in _DERIVED}
    model = _merge_model(network, from_file, given.model)
    training = document.get("train", {})
    if source is not None and data["labels"]:
        training = {"hide_class": source.info.training.settings.hide_class, **training}
    train = _merge_training({**RECIPES.get(name, {}), **recipe}, training, given.train)
    return Settings(
        name,
        _parse_network(model),
        train=parse_config(TrainConfig, train, "train"),
        data=parse_config(DataConfig, data, "data"),
        source=source,
    )


def _merge_training(base: Mapping[str, Any], from_file: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the arguments; later ones win. A given length replaces the file's; the default is `DEFAULT_EPOCHS`."""
    if any(key in given for key in LENGTHS):
        from_file = {key: value for key, value in from_file.items() if key not in LENGTHS}
    merged = complete_recipe({**base, **from_file, **given})
    return merged if any(key in merged for key in LENGTHS) else {**merged, "epochs": DEFAULT_EPOCHS}


def extend_settings(config: RunConfig, given: Given, others: Collection[str] = ()) -> RunConfig:
    """Return the configuration of a resumed run. Raises `UsageError` for an option that must not change."""
    data = dict(given.data)
    data_dir = data.pop("data_dir", None)
    refused = [*given.model, *data, *(["preset"] if given.preset else []), *others]
    refused += [key for key in given.train if key not in (*LENGTHS, *_FREE)]
    if refused:
        flag = "--" + _FLAGS.get(refused[0], refused[0]).replace("_", "-")
        raise UsageError(f"--resume keeps the run's settings; drop {flag} or start a new run")
    settings = config.train.model_dump()
    if any(key in given.train for key in LENGTHS):
        settings |= dict.fromkeys(LENGTHS)
    train = parse_config(TrainConfig, {**settings, **given.train}, "train")
    folder = config.data if data_dir is None else config.data.model_copy(update={"data_dir": data_dir})
    return config.model_copy(update={"data": folder, "train": train})


def _merge_model(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the arguments; later ones win. A different mechanism drops the attention options of earlier arguments."""
    merged: dict[str, Any] = {}
    for layer in layers:
        given = layer.get("attention_options", {})
        if not isinstance(given, Mapping):
            raise UsageError(f"model: attention_options must be a table, found {shorten(repr(given))}")
        options = dict(merged.get("attention_options", {}))
        if "attention" in layer and layer["attention"] != merged.get("attention"):
            options = {}
        merged = {**merged, **layer, "attention_options": {**options, **given}}
    return merged


def read_tables(file: Path) -> dict[str, Any]:
    """Read the tables of a settings file. Values are not checked. Raises `UsageError` if it is not a settings file."""
    try:
        document = read_toml(file)
    except FileNotFoundError:
        raise UsageError(f"no configuration at '{file}'") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"'{file}' is not a readable TOML file: {error}") from None
    for key in document:
        if key not in ("preset", _INIT_FROM, _DISTILL_FROM, *_TABLES):
            raise unknown_name(f"key in {file}", key, ("preset", _INIT_FROM, _DISTILL_FROM, *_TABLES))
    for table in (_INIT_FROM, *_TABLES):
        if not isinstance(document.get(table, {}), dict):
            raise UsageError(f"'{file}': [{table}] must be a table")
    teachers = document.get(_DISTILL_FROM, [])
    if not isinstance(teachers, list) or not all(isinstance(teacher, dict) for teacher in teachers):
        raise UsageError(f"'{file}': [[{_DISTILL_FROM}]] must be tables")
    if not isinstance(document.get("preset", ""), str):
        raise UsageError(f"'{file}': preset must be a name")
    return document


def _describe_shape(image: ImageShape) -> str:
    return f"{image.height} x {image.width} x {image.channels} with {image.kind}"
