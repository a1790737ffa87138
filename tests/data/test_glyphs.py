"""Tests of the `glyphs` set: its images are independent, show whole characters light on dark, and are drawn quickly."""

import numpy as np
import pytest
from PIL import ImageFont

from linformer_cli.data.glyphs import CHARACTERS, COUNTS, draw_glyphs
from linformer_cli.errors import UsageError

FULL = dict(COUNTS)  # all other tests have fewer images


def test_an_image_depends_only_on_its_index() -> None:
    images, labels = draw_glyphs("train", 20, 0, 40)
    some, some_labels = draw_glyphs("train", 20, 30, 35)
    np.testing.assert_array_equal(some, images[30:35])
    np.testing.assert_array_equal(some_labels, labels[30:35])


def test_the_splits_have_different_images() -> None:
    train, train_labels = draw_glyphs("train", 28, 0, 50)
    test, test_labels = draw_glyphs("test", 28, 0, 50)
    assert not np.array_equal(train_labels, test_labels)
    assert not any(np.array_equal(image, other) for image in train for other in test)


@pytest.mark.parametrize("size", [28, 45, 61])
def test_characters_are_complete_and_light_on_dark(size: int) -> None:
    images, _ = draw_glyphs("train", size, 0, 400)
    frame = np.concatenate([images[:, [0, -1]].reshape(400, -1), images[:, :, [0, -1]].reshape(400, -1)], axis=1)
    assert frame.max() < 90
    assert np.median(images) == 0
    assert images.reshape(400, -1).max(axis=1).min() > 90
    assert images.max() == 255


def test_the_mean_image_of_a_character_looks_like_the_character() -> None:
    """'L' has most of its pixels at the bottom and 'T' at the top, and 'I' is narrow."""
    images, labels = draw_glyphs("train", 28, 0, 1500)
    mean = {character: images[labels == CHARACTERS.index(character), :, :, 0].mean(axis=0) for character in "LTIO"}
    assert mean["L"][14:].sum() > 1.2 * mean["L"][:14].sum()
    assert mean["T"][:14].sum() > 1.2 * mean["T"][14:].sum()
    assert (mean["I"].sum(axis=0) > 0).sum() < (mean["O"].sum(axis=0) > 0).sum()
    assert mean["I"][12:16, 12:16].mean() > mean["O"][12:16, 12:16].mean()


@pytest.mark.parametrize("size", [0, 7, 513])
def test_impossible_sizes_are_refused(size: int) -> None:
    with pytest.raises(UsageError, match=f"found {size}"):
        draw_glyphs("train", size)


def test_fonts_are_loaded_once(monkeypatch) -> None:
    """This makes drawing all images quick."""
    assert FULL == {"train": 8_000, "test": 1_000}
    loads, load = [], ImageFont.load_default
    monkeypatch.setattr(ImageFont, "load_default", lambda size: loads.append(size) or load(size=size))
    draw_glyphs("test", 28)
    assert len(loads) == len(set(loads)) < 20
