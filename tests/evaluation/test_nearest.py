"""Tests of the nearest training images of samples, and of what their distances say about copying."""

import itertools

import numpy as np

from linformer_cli.config import ImageShape
from linformer_cli.data.images import ImageSet
from linformer_cli.data.sequence import paint
from linformer_cli.evaluation.nearest import find_nearest, measure_copying, render_nearest


def test_the_nearest_image_is_found_exactly() -> None:
    random = np.random.default_rng(0)
    others = random.integers(0, 256, (3000, 4, 3, 1), dtype=np.uint8)
    images = random.integers(0, 256, (1000, 4, 3, 1), dtype=np.uint8)
    images[7] = others[2999]
    images[8] = others[5]
    images[8, 0, 0, 0] ^= 1
    found = find_nearest(images, others)
    assert found.indices[7] == 2999 and found.distances[7] == 0
    assert found.indices[8] == 5 and found.distances[8] == 1
    every = np.square(images[:20, None].astype(int) - others[None].astype(int)).sum(axis=(2, 3, 4))
    np.testing.assert_array_equal(found.indices[:20], every.argmin(axis=1))
    np.testing.assert_array_equal(found.distances[:20], np.sqrt(every.min(axis=1)))


def test_the_picture_has_each_sample_above_its_nearest_image() -> None:
    samples, nearest = (np.full((13, 16, 16, 1), value, np.uint8) for value in (200, 100))
    picture = np.asarray(render_nearest(samples, nearest).convert("L"))
    column = [(value, len(list(same))) for value, same in itertools.groupby(picture[:, 2]) if value in (100, 200)]
    assert column == [(200, 48), (100, 48), (200, 48), (100, 48)]


def draw_set(split, images) -> ImageSet:
    return ImageSet("drawn", split, images, None)


def test_copies_are_nearer_than_held_out_images() -> None:
    train, held_out, new = np.random.default_rng(0).integers(0, 256, (3, 100, 4, 4, 1), dtype=np.uint8)
    shape, sets = ImageShape(height=4, width=4), (draw_set("train", train), draw_set("validation", held_out))
    samples = np.concatenate([train[[7, 3]], new[:8]])
    found, nearest = measure_copying(samples, *sets, shape)
    assert nearest.indices[:2].tolist() == [7, 3]
    assert (found.samples, found.smallest_distance) == (10, 0)
    assert found.nearer == 2 and "2 of 10 samples nearer than 95 %" in found.describe()
    assert 100 < found.median_distance < 2 * found.held_out_median_distance
    # Of the held-out images themselves, about 5 % are nearer.
    assert measure_copying(held_out, *sets, shape)[0].nearer == 5
    assert measure_copying(train[:1], sets[0], sets[0], shape)[0].nearer == 0


def test_distances_are_those_of_colours_and_not_of_their_numbers() -> None:
    shape = ImageShape(height=1, width=1, levels=3, palette=("#000000", "#ffffff", "#010000"))
    train = np.array([1, 2], np.uint8).reshape(2, 1, 1, 1)
    found = find_nearest(paint(np.zeros((1, 1, 1, 1), np.uint8), shape), train, shape)
    assert (found.indices.tolist(), found.distances.tolist()) == ([1], [1])
