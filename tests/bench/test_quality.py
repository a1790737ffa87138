"""Tests of `lintx bench quality`: its figures have known values, and the judge is trained once."""

import math
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

from linformer_cli.bench.quality import Judge, JudgeRecipe, load_judge, measure_frechet_distance, measure_quality
from linformer_cli.data.images import ImageSet
from linformer_cli.data.look import Look

RECIPE = JudgeRecipe(channels=4, features=16, updates=60, batch=16, learning_rate=0.01)
SHAPE = (6, 5, 3)


def draw_features(mean, covariance, count: int = 50) -> np.ndarray:
    """Features with exactly this mean and covariance."""
    noise = np.random.default_rng(0).normal(size=(count, len(mean)))
    noise -= noise.mean(axis=0)
    noise = noise @ np.linalg.inv(np.linalg.cholesky(np.cov(noise, rowvar=False))).T
    return mean + noise @ np.linalg.cholesky(np.array(covariance)).T


def draw_set(split, count: int = 60) -> ImageSet:
    """Images of three classes: the class is the brightest channel."""
    labels = np.arange(count) % 3
    images = np.random.default_rng(len(split)).integers(0, 100, (count, *SHAPE), dtype=np.uint8)
    images[np.arange(count), :, :, labels] += 100
    return ImageSet("made-up", split, images, labels, classes=3)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LINTX_CACHE", str(tmp_path))
    return tmp_path / "judges"


@pytest.fixture(scope="module")
def untrained() -> Judge:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Judge(SHAPE, 3, RECIPE)


def test_frechet_distance_of_gaussians_equals_the_closed_form() -> None:
    first, second = np.diag([4.0, 9.0, 1.0]), np.diag([1.0, 16.0, 1.0])
    found = measure_frechet_distance(draw_features([1, 2, 3], first), draw_features([1, 4, 4], second, 80))
    assert found == pytest.approx(4 + 1 + (2 - 1) ** 2 + (3 - 4) ** 2)
    # For 2 x 2 matrices, tr(M^(1/2)) = (tr M + 2 det(M)^(1/2))^(1/2), also if the covariances do not commute.
    first, second = np.array([[2.0, 1.0], [1.0, 3.0]]), np.array([[1.0, -0.5], [-0.5, 2.0]])
    product = first @ second
    shared = math.sqrt(np.trace(product) + 2 * math.sqrt(np.linalg.det(product)))
    found = measure_frechet_distance(draw_features([0, 0], first), draw_features([0, 3], second))
    assert found == pytest.approx(9 + 5 + 3 - 2 * shared)
    features = np.random.default_rng(0).normal(size=(40, 8)) * 100
    features[:, 3] = 0  # a unit that is never active
    assert measure_frechet_distance(features, features[::-1]) == pytest.approx(0, abs=1e-3)


def test_the_judge_is_trained_once_unless_its_file_is_damaged(cache) -> None:
    updates: list[int] = []
    train, test = draw_set("train"), draw_set("test")

    def load(labels=train.labels) -> Judge:
        updates.clear()
        return load_judge(train.images, labels, 3, RECIPE, updates.append)

    first = load()
    assert updates == list(range(1, 61))
    assert (first.judge(test.images)[1].argmax(axis=1) == test.labels).mean() > 0.95
    second = load()
    assert not updates and second.sha256 == first.sha256
    (file,) = cache.iterdir()
    for damaged in (b"no weights", file.read_bytes()[:-1]):
        file.write_bytes(damaged)
        assert load().sha256 == first.sha256 and len(updates) == 60
    load(train.labels[::-1].copy())
    assert len(updates) == 60 and len(list(cache.iterdir())) == 2
    shutil.rmtree(cache)
    cache.write_text("a file where a folder should be")  # a cache that cannot be written is no error
    for _ in range(2):
        assert load().sha256 == first.sha256 and len(updates) == 60


def test_the_learning_rate_of_the_judge_rises_for_a_tenth_and_falls_to_0(cache, record_rates) -> None:
    train = draw_set("train")
    rates = record_rates(lambda: load_judge(train.images, train.labels, 3, RECIPE, lambda update: None))
    rising, falling = (number / 6 for number in range(1, 6)), (left / 54 for left in range(55, 0, -1))
    assert rates == pytest.approx([0.01 * min(1, share) for share in (*rising, *falling)])


def test_real_images_as_samples_are_as_good_as_real_images(cache) -> None:
    train, test = draw_set("train"), draw_set("test", 70)
    train = replace(train, measured=Look(train.shape, class_names=("a", "b", "c")))
    judge = load_judge(train.images, train.labels, 3, RECIPE, lambda update: None)
    # All test images are the samples, so both have the same distribution.
    report = measure_quality(judge, test.images, test.labels, train, test, 1.5)
    samples, tested, trained = report.rows
    assert (samples.images, tested.images, trained.images) == (70, 70, 60)
    assert samples.frechet_distance == pytest.approx(0, abs=1e-4) and trained.frechet_distance > 0.01
    for figure in ("sure_share", "class_share", "smallest_distance"):
        assert getattr(samples, figure) == getattr(tested, figure)
    assert samples.nearest_distance == pytest.approx(tested.nearest_distance)
    assert samples.class_share == report.judge_accuracy and report.test_images == 70
    assert [(row.name, row.samples) for row in report.classes] == [("a", 24), ("b", 23), ("c", 23)]
    assert [row.recognised / row.samples for row in report.classes] == [row.accuracy for row in report.classes]
    assert (samples.bits_per_dim, tested.bits_per_dim) == (1.5, None)


def test_copies_and_wrong_classes_are_noticed(cache) -> None:
    train, test = draw_set("train"), draw_set("test")
    judge = load_judge(train.images, train.labels, 3, RECIPE, lambda update: None)
    samples = train.images[:30]
    report = measure_quality(judge, samples, (train.labels[:30] + 1) % 3, train, test)
    copied, tested, _ = report.rows
    assert copied.nearest_distance == copied.smallest_distance == 0 < tested.smallest_distance
    assert copied.class_share < 0.1 < 0.9 < tested.class_share
    without = measure_quality(judge, samples, None, train, test)
    assert without.rows[0].class_share is None and without.classes == []


@pytest.mark.parametrize(("probability", "sure"), [(0.91, 1), (0.89, 0)])
def test_images_are_sure_if_one_class_has_a_probability_of_at_least_nine_tenths(probability, sure) -> None:
    judge = Judge(SHAPE, 3, RECIPE)
    rest = (1 - probability) / 2
    with torch.no_grad():
        judge.output.weight.zero_()
        judge.output.bias.copy_(torch.tensor([probability, rest, rest]).log())
    train, test = draw_set("train"), draw_set("test")
    assert [row.sure_share for row in measure_quality(judge, test.images, None, train, test).rows] == [sure] * 3


def test_a_judge_takes_every_image_size(untrained) -> None:
    features, probabilities = untrained.judge(draw_set("test", 5).images)
    assert features.shape == (5, 16) and probabilities.shape == (5, 3)
    np.testing.assert_allclose(probabilities.sum(axis=1), 1)
    for shape in ((1, 1, 1), (4, 4, 1), (9, 2, 3)):
        assert Judge(shape, 2, RECIPE).judge(np.zeros((1, *shape), np.uint8))[0].shape == (1, 16)
