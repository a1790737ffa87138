"""From preset, file and flags to one resolved configuration: flag over file over preset over default."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from linformer_cli.config import DataConfig, ImageShape, ModelConfig, NetworkConfig, RunConfig, parse_config
from linformer_cli.errors import UsageError, unknown_name
from linformer_cli.model.catalogue import parse_options
from linformer_cli.presets import RECIPES, find_preset

DEFAULT_PRESET = "mnist-small"
DEFAULT_EPOCHS = 3.0
LENGTHS = ("steps", "epochs", "max_time")
_TABLES = ("model", "data", "train")


@dataclass(frozen=True)
class Settings:
    """The layers merged, before the images are known. `model`, `data` and `train` are plain values."""

    preset: str
    model: dict[str, Any]
    data: dict[str, Any]
    train: dict[str, Any]

    @property
    def data_config(self) -> DataConfig:
        return parse_config(DataConfig, self.data, "data")

    def build(self, image: ImageShape) -> RunConfig:
        """The whole configuration for images of this shape, attention options filled in and checked."""
        network = parse_config(NetworkConfig, self.model, "model")
        options = parse_options(network.attention, network.attention_options).model_dump(exclude_none=True)
        values = {**network.model_dump(), "attention_options": options, "image": image.model_dump()}
        model = parse_config(ModelConfig, values, "model")
        tables = {"model": model.model_dump(), "data": self.data, "train": self.train}
        return parse_config(RunConfig, {"preset": self.preset, **tables}, "run")


def merge_settings(
    file: Path | None,
    preset: str | None,
    model: Mapping[str, Any],
    data: Mapping[str, Any],
    train: Mapping[str, Any],
) -> Settings:
    """Merge what was given on the command line (`preset`, `model`, `data`, `train`: given keys only) over `file`.

    Raises `UsageError` for unknown keys and names, and for a file that is not TOML.
    """
    document = _read_file(file) if file is not None else {}
    name = preset or document.get("preset") or DEFAULT_PRESET
    network = find_preset(name).model_dump()
    from_file = {table: dict(document.get(table, {})) for table in _TABLES}
    # A run's own config.toml can be given again; its image size comes from the data all the same.
    from_file["model"].pop("image", None)
    merged_model = _merge_model(network, from_file["model"], model)
    lengths = [key for layer in (train, from_file["train"]) for key in LENGTHS if key in layer]
    merged_train = {**RECIPES.get(name, {}), **from_file["train"], **train}
    if any(key in train for key in LENGTHS):
        for key in LENGTHS:
            if key not in train:
                merged_train.pop(key, None)
    if not lengths:
        merged_train["epochs"] = DEFAULT_EPOCHS
    return Settings(name, merged_model, {**from_file["data"], **data}, merged_train)


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


def _read_file(file: Path) -> dict[str, Any]:
    try:
        document = tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"no configuration at '{file}'") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"'{file}' is not a readable TOML file: {error}") from None
    for key in document:
        if key not in ("preset", *_TABLES):
            raise unknown_name(f"key in {file}", key, ("preset", *_TABLES))
    for table in _TABLES:
        if not isinstance(document.get(table, {}), dict):
            raise UsageError(f"'{file}': [{table}] must be a table")
    if not isinstance(document.get("preset", ""), str):
        raise UsageError(f"'{file}': preset must be a name")
    return document
