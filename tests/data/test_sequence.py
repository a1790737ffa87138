"""Tests of the conversion of images to values and back: raster order, channels innermost, evenly spaced levels."""

import numpy as np
import pytest
import torch

from linformer_cli.config import ImageShape
from linformer_cli.data.sequence import images_to_values, values_to_images


def random_images(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)


def test_values_are_in_raster_order_with_channels_innermost() -> None:
    images = random_images(2, 3, 4, 3)
    values = images_to_values(images)
    assert values.dtype == torch.int64
    assert values.shape == (2, 36)
    for row, column, channel in [(0, 0, 0), (0, 0, 2), (0, 1, 0), (1, 0, 1), (2, 3, 2)]:
        assert values[1, (row * 4 + column) * 3 + channel] == images[1, row, column, channel]


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_converting_to_values_and_back_changes_nothing(channels: int) -> None:
    images = random_images(3, 5, 4, channels)
    shape = ImageShape.model_validate({"height": 5, "width": 4, "channels": channels})
    back = values_to_images(images_to_values(images), shape)
    assert back.dtype == np.uint8
    np.testing.assert_array_equal(back, images)


def test_converting_to_images_and_back_changes_no_level() -> None:
    for levels in range(2, 257):
        values = torch.arange(levels)[None]
        shape = ImageShape(height=1, width=levels, levels=levels)
        images = values_to_images(values, shape)
        assert images[0, 0, 0, 0] == 0
        assert images[0, 0, -1, 0] == 255
        # Every brightness is less than 1 away from the exact value of its level.
        np.testing.assert_array_less(np.abs(images.ravel() - np.linspace(0, 255, levels)), 1)
        assert torch.equal(images_to_values(images, shape), values), levels


def test_images_with_a_palette_hold_values() -> None:
    images = random_images(3, 5, 4, 1) % 3
    shape = ImageShape(height=5, width=4, levels=3, palette=("#00000000", "#ffffff", "#10203080"))
    values = images_to_values(images, shape)
    np.testing.assert_array_equal(values.flatten(), images.ravel())
    np.testing.assert_array_equal(values_to_images(values, shape), images)


@pytest.mark.parametrize("levels", [2, 3, 16, 100, 255])
def test_brightness_is_divided_evenly_into_levels(levels: int) -> None:
    ramp = np.arange(256, dtype=np.uint8).reshape(1, 16, 16, 1)
    values = images_to_values(ramp, ImageShape(height=16, width=16, levels=levels))[0]
    assert torch.all(values.diff() >= 0)
    counts = torch.bincount(values, minlength=levels)
    assert len(counts) == levels
    assert counts.max() - counts.min() <= 1


def test_a_read_only_view_is_copied_without_a_warning() -> None:
    images = random_images(2, 3, 3, 1)
    images.setflags(write=False)
    values = images_to_values(images)
    values += 1
    np.testing.assert_array_equal(images, random_images(2, 3, 3, 1))


@pytest.mark.parametrize("images", [np.zeros((2, 3, 3), np.uint8), np.zeros((2, 3, 3, 1), np.float32)])
def test_arrays_of_another_shape_or_type_are_refused(images: np.ndarray) -> None:
    with pytest.raises(ValueError, match="uint8"):
        images_to_values(images)


@pytest.mark.parametrize(
    "values", [torch.zeros(2, 8).long(), torch.zeros(9).long(), torch.full((1, 9), -1), torch.full((1, 9), 4)]
)
def test_values_of_another_shape_or_range_are_refused(values: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="values must be"):
        values_to_images(values, ImageShape(height=3, width=3, levels=4))
