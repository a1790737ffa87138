"""Tests of folders of sampled images. An image is reused if its settings are the same, and otherwise left alone."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from linformer_cli.errors import DataError, UsageError
from linformer_cli.sampling.numbered import NumberedImages

SETTINGS = {"checkpoint": "a", "checkpoint_sha256": "1f", "seed": 3, "temperature": 0.9, "top_k": None, "batch": 2}


def images(channels: int = 1) -> Any:
    return np.random.default_rng(channels).integers(0, 256, (3, 5, 4, channels), dtype=np.uint8)


def begin(folder: Path, **changes: object) -> NumberedImages:
    return NumberedImages(folder / "drawn", lambda index: {**SETTINGS, "index": index, **changes})


@pytest.mark.parametrize("channels", [1, 3, 4])
@pytest.mark.parametrize("colours", [(), [(n, 255 - n, 7, n) for n in range(256)]], ids=["values", "palette"])
def test_a_written_image_is_reused_and_can_be_read_again(tmp_path, channels, colours) -> None:
    drawn = images(channels)
    folder = replace(begin(tmp_path), colours=colours if channels == 1 else ())
    assert not folder.holds(0)
    for index, image in zip((0, 7, 123_456), drawn, strict=True):
        folder.write(index, image)
        assert folder.holds(index)
    assert sorted(path.name for path in folder.folder.iterdir()) == ["00000.png", "00007.png", "123456.png"]
    assert np.array_equal(folder.read([123_456, 0]), drawn[[2, 0]])
    assert not folder.holds(1)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"seed": 4}, "with seed 3, not 4"),
        ({"temperature": 1.0}, "with temperature 0.9, not 1.0"),
        ({"top_k": 1}, "with top_k None, not 1"),
        ({"checkpoint_sha256": "2f"}, "with checkpoint_sha256 1f, not 2f"),
        ({"new": 1}, "with new None, not 1"),
    ],
)
def test_an_image_sampled_with_other_settings_is_neither_reused_nor_replaced(tmp_path, raises_one_line, change, said):
    begin(tmp_path).write(0, images()[0])
    with raises_one_line(UsageError, "00000.png", said, "choose another folder"):
        begin(tmp_path, **change).holds(0)


@pytest.mark.parametrize("change", [{"batch": 64}, {"device": "cuda"}, {"engine": "native"}, {"checkpoint": "b"}])
def test_an_image_is_reused_for_any_device_engine_and_batch(tmp_path, change) -> None:
    begin(tmp_path).write(0, images()[0])
    assert begin(tmp_path, **change).holds(0)


def test_an_image_with_the_wrong_number_is_neither_reused_nor_replaced(tmp_path, raises_one_line) -> None:
    folder = begin(tmp_path)
    folder.write(0, images()[0])
    folder.path(0).rename(folder.path(1))
    with raises_one_line(UsageError, "00001.png", "with index 0, not 1"):
        folder.holds(1)


def test_a_picture_from_another_program_is_not_replaced(tmp_path, raises_one_line) -> None:
    folder = begin(tmp_path)
    folder.folder.mkdir()
    Image.new("L", (3, 3)).save(folder.path(0))
    with raises_one_line(UsageError, "00000.png", "was not written by lintx"):
        folder.holds(0)


def test_an_image_that_is_far_too_large_gives_a_one_line_error(tmp_path, monkeypatch, raises_one_line) -> None:
    folder = begin(tmp_path)
    folder.write(0, images()[0])
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 9)
    assert not folder.holds(0)
    with raises_one_line(DataError, "00000.png"):
        folder.read([0])


def test_a_damaged_image_is_not_reused(tmp_path, raises_one_line) -> None:
    folder = begin(tmp_path)
    folder.write(0, images()[0])
    whole = folder.path(0).read_bytes()
    for size in (0, 10, len(whole) - 40):
        folder.path(0).write_bytes(whole[:size])
        assert not folder.holds(0)
        with raises_one_line(DataError, "00000.png"):
            folder.read([0])
