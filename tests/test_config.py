"""Tests of configurations: unknown keys are refused at every level, fields are frozen, and errors take one line."""

import math
from typing import Any

import pytest
from loops import loop_over
from pydantic import ValidationError

from linformer_cli.config import DataConfig, ImageShape, ModelConfig, RunConfig, TrainConfig
from linformer_cli.documents import parse_config
from linformer_cli.errors import UsageError
from linformer_cli.model.mixers import parse_options

IMAGE = {"height": 8, "width": 8}
RUN: dict[str, Any] = {"model": {"image": IMAGE}, "data": {"name": "glyphs"}, "train": {"steps": 5}}


def changed(path: str, value: object) -> dict[str, Any]:
    """Return RUN with `value` at a dotted `path`."""

    def put(table: dict[str, Any], keys: list[str]) -> dict[str, Any]:
        inner = value if len(keys) == 1 else put(table.get(keys[0], {}), keys[1:])
        return {**table, keys[0]: inner}

    return put(RUN, path.split("."))


# Unknown keys


@loop_over(
    ("path", "table", "nearest"),
    [
        ("modell", "run", "model"),
        ("model.layer", "run.model", "layers"),
        ("model.image.hight", "run.model.image", "height"),
        ("data.image_sizes", "run.data", "image_size"),
        ("train.learning_rat", "run.train", "learning_rate"),
        ("init_from.chekpoint", "run.init_from", "checkpoint"),
    ],
)
def test_an_unknown_key_is_refused_with_a_suggestion_at_every_level(raises_one_line, path, table, nearest) -> None:
    key = path.rpartition(".")[2]
    with raises_one_line(UsageError, f"'{key}'", table, f"did you mean '{nearest}'?"):
        parse_config(RunConfig, changed(path, 1), "run")


def test_an_unknown_key_without_a_similar_one_lists_the_known_keys(raises_one_line) -> None:
    with raises_one_line(UsageError, "'chekpoint'", "did you mean 'checkpoint'?"):
        parse_config(RunConfig, {**RUN, "distill_from": [{"chekpoint": "a"}]}, "run")
    with raises_one_line(
        UsageError, "'zzz'", "known: channels, colours, data_dir, fit, ground, image_size, labels, length"
    ):
        parse_config(DataConfig, {"zzz": 1}, "data")


def test_mechanisms_treat_an_image_of_one_row_as_a_square() -> None:
    assert ImageShape(height=1, width=1_024).row_for_attention == 32
    assert ImageShape(height=2, width=512, channels=3).row_for_attention == 1_536


# Values


@loop_over(
    ("path", "value"),
    [
        *(("train.batch", value) for value in (True, "4", 4.0)),
        *(("train.learning_rate", value) for value in (True, "0.1")),
        *(("train.flip", value) for value in (1, "yes")),
        *(("data.channels", value) for value in (True, 3.0)),
        *(("data.name", 1), ("model.image.height", 8.0), ("train.optimizer", True)),
        # Values out of their range.
        *(("model.layers", value) for value in (0, "many")),
        *(("model.image.levels", value) for value in (1, 257)),
        *(("model.dropout", 1.0), ("model.activation", "swish"), ("model.image.channels", 2)),
        *(("train.steps", -3), ("train.learning_rate", math.inf), ("train.weight_decay", math.nan)),
        *(("train.seed", 2**63), ("train.final_learning_rate_fraction", 1.5)),
    ],
)
def test_a_value_of_another_type_or_out_of_its_range_is_refused_with_its_key(raises_one_line, path, value) -> None:
    with raises_one_line(UsageError, f"run: {path}: ", f"found {value!r}"):
        parse_config(RunConfig, changed(path, value), "run")


def test_an_integer_is_a_number_and_options_of_attention_may_be_text(raises_one_line) -> None:
    assert parse_config(RunConfig, changed("train.learning_rate", 1), "run").train.learning_rate == 1
    assert parse_options("linear", {"chunk": "4"}) == parse_options("linear", {"chunk": 4})
    for wrong in (True, 4.0, "4.5"):
        with raises_one_line(UsageError, "chunk"):
            parse_options("linear", {"chunk": wrong})


def test_muon_refuses_steps_that_overflow(raises_one_line) -> None:
    settings = {"steps": 1, "optimizer": "muon", "learning_rate": 1e30}
    parse_config(TrainConfig, settings, "train")
    for wrong in ({"learning_rate": 1e31}, {"weight_decay": 2}):
        with raises_one_line(UsageError, "at most 1e+30"):
            parse_config(TrainConfig, settings | wrong, "train")


def test_a_missing_key_is_named_and_the_other_keys_are_not(raises_one_line) -> None:
    with raises_one_line(UsageError, "model: image: ", "required") as error:
        parse_config(ModelConfig, {"layers": 2}, "model")
    assert "layers" not in str(error.value)


@loop_over(
    "wrong, right, said",
    [
        (
            {"model": {"embedding": "paper", "width": 34, "image": IMAGE}},
            {"model": {"embedding": "grid", "width": 34, "image": IMAGE}},
            "run: model: embedding 'paper' needs a width divisible by 4, found 34",
        ),
        (
            {"model": {"feed_forward_kind": "boom", "width": 48, "feed_forward": 100, "image": IMAGE}},
            {"model": {"feed_forward_kind": "boom", "width": 48, "feed_forward": 96, "image": IMAGE}},
            "'boom' needs a feed_forward that is a multiple of width (48), found 100",
        ),
        (
            {"model": {"context": "residual", "image": IMAGE}},
            {"model": {"context": "residual", "image": {**IMAGE, "channels": 3}}},
            "context 'residual' needs three or four channels",
        ),
        (
            {"train": {"steps": 1, "shift": 7}, "model": {"image": {"height": 9, "width": 7}}},
            {"train": {"steps": 1, "shift": 6}, "model": {"image": {"height": 9, "width": 7}}},
            "run: train.shift must be less than an image's shorter side (7 pixels), found 7",
        ),
        (
            {"data": {"name": "bytes:book.txt"}, "train": {"steps": 1, "flip": True}},
            {"data": {"name": "cifar10"}, "train": {"steps": 1, "flip": True}},
            "run: train.flip mirrors images, and the data are bytes; drop it",
        ),
    ],
)
def test_settings_that_do_not_fit_each_other_are_refused(raises_one_line, wrong, right, said) -> None:
    with raises_one_line(UsageError, said):
        parse_config(RunConfig, RUN | wrong, "run")
    parse_config(RunConfig, RUN | right, "run")


def test_blocks_may_step_over_the_pixels_of_colour_images() -> None:
    config = ModelConfig(context="residual", image=ImageShape(height=4, width=5, channels=3))
    assert (config.image.positions, config.block_image.positions) == (60, 20)


def test_a_palette_has_one_colour_for_each_value(raises_one_line) -> None:
    image = {"height": 4, "width": 5, "levels": 2, "palette": ["#00000000", "#a0b1c2"]}
    found = parse_config(ImageShape, image, "image")
    assert found.colours == [(0, 0, 0, 0), (160, 177, 194, 255)]
    assert parse_config(ImageShape, found.model_dump(mode="json"), "image") == found
    assert "palette" not in ImageShape(height=4, width=5).model_dump()
    with raises_one_line(UsageError, "image: a palette of 2 colours needs 1 channel and as many levels, found 1 and 3"):
        parse_config(ImageShape, {**image, "levels": 3}, "image")
    with raises_one_line(UsageError, "found 3 and 2"):
        parse_config(ImageShape, {**image, "channels": 3}, "image")
    with raises_one_line(UsageError, "image: the colours of a palette must differ"):
        parse_config(ImageShape, {**image, "palette": ["#a0b1c2", "#a0b1c2ff"]}, "image")
    with raises_one_line(UsageError, "image: palette.1: ", "found '#A0B1C2'"):
        parse_config(ImageShape, {**image, "palette": ["#00000000", "#A0B1C2"]}, "image")
    with raises_one_line(UsageError, "model: head 'mixture' needs values with an order"):
        parse_config(ModelConfig, {"head": "mixture", "image": image}, "model")


@loop_over("given", [{}, {"steps": 5, "epochs": 1.0}, {"steps": 5, "epochs": 1.0, "max_time": 60.0}])
def test_no_length_and_two_numbers_of_steps_are_refused(raises_one_line, given: dict[str, float]) -> None:
    found = ", ".join(f"'{key}'" for key in given) or "none"
    with raises_one_line(UsageError, "train", "set the length by steps or epochs, by max_time, or by both", found):
        parse_config(TrainConfig, given, "train")


# Frozen


def test_a_parsed_configuration_cannot_be_changed() -> None:
    config = parse_config(RunConfig, RUN, "run")
    for part, name in (
        (config, "preset"),
        (config.model, "layers"),
        (config.model.image, "width"),
        (config.data, "name"),
        (config.train, "steps"),
    ):
        with pytest.raises(ValidationError, match="frozen"):
            setattr(part, name, 1)


def test_a_configuration_can_be_parsed_from_its_model_dump() -> None:
    config = parse_config(RunConfig, changed("model.attention_options", {"a": True, "b": 1, "c": 0.5, "d": "x"}), "run")
    again = parse_config(RunConfig, config.model_dump(exclude_none=True), "run")
    assert again == config
    kinds = [type(value) for value in again.model.attention_options.values()]
    assert kinds == [bool, int, float, str]


def test_a_long_wrong_value_is_shortened() -> None:
    for wrong in ({"steps": "9" * 4000}, {"x" * 4000: 1}, {"optimizer": ["x" * 4000]}):
        with pytest.raises(UsageError) as raised:
            parse_config(TrainConfig, {"steps": 1, **wrong}, "train")
        assert len(str(raised.value)) < 700 and "..." in str(raised.value)
