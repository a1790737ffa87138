"""Tests of data sets by name: splits, the data folder, the user's own arrays, and one-line errors."""

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from loops import loop_over
from PIL import Image

from linformer_cli.config import DataConfig, ImageShape
from linformer_cli.data import SPLITS
from linformer_cli.data import images as images_module
from linformer_cli.data.glyphs import draw_glyphs
from linformer_cli.data.images import ImageSet, load_for_training, load_images
from linformer_cli.data.look import Look
from linformer_cli.errors import DataError, UsageError

REAL_DATA = os.environ.get("LINTX_DATA")


@pytest.fixture(autouse=True)
def no_folders_of_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("LINTX_DATA", raising=False)
    monkeypatch.delenv("LINTX_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def save_arrays(folder: Path, count: int = 20, part: str = "train", **arrays: Any) -> str:
    folder.mkdir(exist_ok=True)
    pixels = np.random.default_rng(0).integers(0, 256, (count, 4, 5), dtype=np.uint8)
    np.save(folder / f"{part}-images.npy", arrays.get("images", pixels))
    if "labels" in arrays:
        np.save(folder / f"{part}-labels.npy", arrays["labels"])
    return f"array:{folder}"


# Names and splits


def test_unknown_names_are_refused_with_a_suggestion(raises_one_line) -> None:
    with raises_one_line(UsageError, "unknown data set 'mnits'", "'mnist'"):
        load_images("mnits", "train")
    with raises_one_line(UsageError, "'array:DIR'"):
        load_images("array", "train")
    with raises_one_line(UsageError, "unknown data set"):
        load_images("mnist:train", "train")
    with raises_one_line(UsageError, "unknown split 'valid'", "'validation'"):
        load_images("glyphs", "valid")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("count", "train"), [(2, 1), (9, 8), (20, 18), (49_999, 45_000), (50_000, 45_000), (60_000, 55_000)]
)
def test_train_and_validation_are_disjoint_and_complete(count: int, train: int, tmp_path: Path) -> None:
    labels = np.arange(count)
    pixels = np.zeros((count, 1, 1), np.uint8)
    name = save_arrays(tmp_path, images=pixels, labels=labels)
    first, second = load_images(name, "train"), load_images(name, "validation")
    assert len(first) == train
    assert first.labels is not None
    assert second.labels is not None
    np.testing.assert_array_equal(np.concatenate([first.labels, second.labels]), labels)


def test_a_single_training_image_is_refused(tmp_path: Path, raises_one_line) -> None:
    name = save_arrays(tmp_path, count=1)
    with raises_one_line(DataError, "1 training image", "2"):
        load_images(name, "train")


# Glyphs


def test_glyphs_are_loaded_by_name_and_size() -> None:
    drawn, labels = draw_glyphs("train", 12, 710, 800)
    validation = load_images("glyphs", "validation", image_size=12)
    assert len(validation) == 80
    assert validation.shape.model_dump() == {"height": 12, "width": 12, "channels": 1, "levels": 256}
    np.testing.assert_array_equal(validation.images, drawn[10:])
    np.testing.assert_array_equal(validation.labels, labels[10:])
    test = load_images("glyphs", "test")
    assert test.images.shape == (200, 28, 28, 1)
    np.testing.assert_array_equal(test.images[:5], draw_glyphs("test", 28, 0, 5)[0])


@pytest.mark.parametrize("name", ["glyphs", "folder:somewhere"])
def test_images_too_large_for_a_model_are_refused_before_they_are_drawn(name: str, raises_one_line) -> None:
    with raises_one_line(UsageError, "--image-size 1025: an image can have at most 1,048,576 values, found 1,050,625"):
        load_images(name, "train", image_size=1025)


def test_settings_that_a_data_set_does_not_take_are_refused(raises_one_line) -> None:
    with raises_one_line(UsageError, "--image-size 14 is for glyphs and folder:PATH, not for", "drop"):
        load_images("mnist", "train", image_size=14)
    with raises_one_line(UsageError, "--tile 14 is for folder:PATH, not for", "cut or resize them with numpy; drop"):
        load_images("array:somewhere", "train", tile=14)


# Arrays


@pytest.mark.parametrize(
    ("shape", "channels"), [((20, 4, 5), 1), ((20, 4, 5, 1), 1), ((20, 4, 5, 3), 3), ((20, 4, 3), 1)]
)
def test_arrays_may_be_grey_or_in_colour(shape: tuple[int, ...], channels: int, tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    found = load_images(save_arrays(tmp_path, images=pixels), "train")
    assert found.shape.channels == channels
    assert found.shape.positions == pixels[0].size
    assert found.labels is None
    np.testing.assert_array_equal(found.images, pixels[:18].reshape(18, *shape[1:3], channels))


def test_the_look_of_a_model_changes_the_colours_of_an_array_not_its_size(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (20, 8, 6, 3), dtype=np.uint8)
    name = save_arrays(tmp_path, images=pixels)
    grey = load_images(name, "train", look=Look(ImageShape(height=8, width=6)))
    assert abs(grey.images[..., 0] - pixels[:18] @ [0.299, 0.587, 0.114]).max() < 1
    assert load_images(name, "train", look=Look(ImageShape(height=9, width=6))).images.shape == (18, 8, 6, 3)


def test_arrays_too_large_for_a_model_are_refused(tmp_path: Path, raises_one_line) -> None:
    found = load_images(save_arrays(tmp_path, images=np.zeros((2, 600, 600, 3), np.uint8)), "train")
    with raises_one_line(
        UsageError, f"'array:{tmp_path}': an image can have at most 1,048,576 values, found 1,080,000"
    ):
        _ = found.shape


@loop_over("kind", ["array", "folder", "bytes"])
def test_a_file_that_is_cut_short_is_noticed_before_it_is_read(tmp_path: Path, monkeypatch, raises_one_line, kind):
    monkeypatch.setenv("LINTX_CACHE", str(tmp_path / "cache"))
    pixels, data = np.random.default_rng(0).integers(0, 256, (40, 64, 64), dtype=np.uint8), tmp_path / kind
    data.mkdir()
    np.save(data / "train-images.npy", pixels)
    for number, image in enumerate(pixels if kind == "folder" else ()):
        Image.fromarray(image).save(data / f"{number}.png")
    images = load_images(f"{kind}:{data}", "train").images
    assert images[np.array([5, 0])].shape[0] == 2
    (file,) = (tmp_path / "cache").rglob("images.bin") if kind == "folder" else [data / "train-images.npy"]
    os.truncate(file, 1000)
    with raises_one_line(DataError, str(file), "became shorter"):
        images[np.array([5, 0])]


def test_arrays_are_mapped_and_labels_become_int64(tmp_path: Path) -> None:
    found = load_images(save_arrays(tmp_path, labels=np.arange(20, dtype=np.uint8)), "train")
    assert isinstance(found.images, np.memmap)
    assert not found.images.flags.writeable
    assert found.labels is not None
    assert found.labels.dtype == np.int64


@pytest.mark.parametrize(
    ("pixels", "part"),
    [
        (np.zeros((20, 4, 5), np.complex64), "complex64"),
        (np.zeros((20, 4), np.uint8), "[20, 4]"),
        (np.zeros((20, 4, 5, 2), np.uint8), "[20, 4, 5, 2]"),
        (np.zeros((20, 4, 5, 3, 1), np.uint8), "[20, 4, 5, 3, 1]"),
        (np.zeros((0, 4, 5), np.uint8), "no images"),
        (np.zeros((20, 0, 5), np.uint8), "no images"),
        (np.array([{}, None], dtype=object), "not a complete .npy file"),
    ],
)
def test_arrays_of_other_shapes_or_types_are_refused(
    pixels: np.ndarray, part: str, tmp_path: Path, raises_one_line
) -> None:
    with raises_one_line(DataError, "train-images.npy", part):
        load_images(save_arrays(tmp_path, images=pixels), "train")


@pytest.mark.parametrize(
    "labels",
    [
        np.arange(19),
        np.zeros(20),
        np.zeros((20, 1), np.int64),
        np.array([None] * 20, dtype=object),
        np.array([2**64 - 1] * 20, np.uint64),
    ],
)
def test_labels_of_other_shapes_or_types_are_refused(labels: np.ndarray, tmp_path: Path, raises_one_line) -> None:
    with raises_one_line(DataError, "train-labels.npy"):
        load_images(save_arrays(tmp_path, labels=labels), "train")


def test_damaged_arrays_are_refused(tmp_path: Path, raises_one_line) -> None:
    name, file = save_arrays(tmp_path), tmp_path / "train-images.npy"
    content = file.read_bytes()
    for damaged in (b"", b"hello\n", pickle.dumps([1]), content[:40], content[:-100]):
        file.write_bytes(damaged)
        with raises_one_line(DataError, "train-images.npy", "is not a complete .npy file"):
            load_images(name, "train")
    with file.open("wb") as sink:
        np.savez(sink, a=np.zeros(3))
    with raises_one_line(DataError, "train-images.npy", "is an archive"):
        load_images(name, "train")
    file.unlink()
    file.mkdir()
    with raises_one_line(DataError, "train-images.npy", "cannot read"):
        load_images(name, "train")


@pytest.mark.parametrize("part", ["images", "labels"])
def test_a_pipe_is_refused(part: str, tmp_path: Path, raises_one_line) -> None:
    name = save_arrays(tmp_path)
    (tmp_path / f"train-{part}.npy").unlink(missing_ok=True)
    os.mkfifo(tmp_path / f"train-{part}.npy")
    with raises_one_line(DataError, f"train-{part}.npy is a pipe or a device; save the array to a file"):
        load_images(name, "train")


def test_missing_arrays_and_broken_links_are_refused(tmp_path: Path, raises_one_line) -> None:
    name = save_arrays(tmp_path)
    (tmp_path / "train-labels.npy").symlink_to(tmp_path / "nowhere.npy")
    with raises_one_line(DataError, "train-labels.npy does not exist"):
        load_images(name, "train")
    with raises_one_line(DataError, "test-images.npy does not exist"):
        load_images(name, "test")
    with raises_one_line(DataError, "does not exist"):
        load_images(f"array:{tmp_path}/nowhere", "train")
    with raises_one_line(UsageError, "array:DIR"):
        load_images("array:", "train")


# The data folder


@pytest.fixture
def asked_root(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Path, str]]:
    """Replaces the torchvision loader and records the folders that it was called with."""
    roots: list[tuple[Path, str]] = []

    def load(name: str, train: bool, root: Path, origin: str) -> tuple[np.ndarray, np.ndarray]:
        roots.append((root, origin))
        return np.zeros((50 if train else 10, 2, 2, 1), np.uint8), np.zeros(50 if train else 10, np.int64)

    monkeypatch.setattr(images_module, "load_torchvision_set", load)
    return roots


def test_the_data_folder_comes_from_the_argument_or_the_environment_or_the_cache(
    asked_root: list[tuple[Path, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_images("mnist", "train")
    (tmp_path / "environment").mkdir()
    monkeypatch.setenv("LINTX_DATA", str(tmp_path / "environment"))
    load_images("mnist", "validation")
    (tmp_path / "argument").mkdir()
    load_images("mnist", "test", data_dir=str(tmp_path / "argument"))
    monkeypatch.setenv("LINTX_DATA", "")
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    load_images("mnist", "train")
    assert asked_root == [
        (tmp_path / "cache" / "lintx" / "data", "the default"),
        (tmp_path / "environment", "LINTX_DATA"),
        (tmp_path / "argument", "--data-dir"),
        (tmp_path / "home" / ".cache" / "lintx" / "data", "the default"),
    ]
    assert all(root.is_dir() for root, _ in asked_root)


@pytest.mark.parametrize("name", ["mnist", "array", "glyphs"])
def test_training_reads_every_file_once(
    name: str, asked_root: list[tuple[Path, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads, read = [], np.load
    monkeypatch.setattr(np, "load", lambda path, **given: reads.append(path) or read(path, **given))
    if name == "array":
        name = save_arrays(tmp_path / "mine", labels=np.arange(20))
    found = load_for_training(DataConfig(name=name))
    assert len(asked_root) == (name == "mnist")
    assert len(reads) == (2 if name.startswith("array") else 0)  # one read each for images and labels
    assert [images.split for images in found] == ["train", "validation"]
    for images in found:
        alone = load_images(name, images.split)
        np.testing.assert_array_equal(images.images, alone.images)
        np.testing.assert_array_equal(images.labels, alone.labels)
        assert images.classes == alone.classes > 0


def test_a_data_folder_that_is_missing_or_cannot_be_created_is_refused(
    tmp_path: Path, monkeypatch, raises_one_line
) -> None:
    with raises_one_line(DataError, "nowhere", "(--data-dir) does not exist"):
        load_images("mnist", "train", data_dir=tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()
    (tmp_path / "file").touch()
    monkeypatch.setenv("LINTX_DATA", str(tmp_path / "file"))
    with raises_one_line(DataError, "(LINTX_DATA) is not a folder", "--data-dir"):
        load_images("mnist", "train")
    monkeypatch.delenv("LINTX_DATA")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with raises_one_line(DataError, "file", "--data-dir"):
        load_images("mnist", "train")
    with raises_one_line(DataError, "--data-dir"):
        load_images("mnist", "train", data_dir="~nobody-of-that-name/data")


# ImageSet


def test_the_border_mean_covers_the_outermost_ring_of_pixels() -> None:
    pixels = np.zeros((1001, 5, 4, 3), np.uint8)
    pixels[:, 1:-1, 1:-1] = 255
    assert ImageSet("x", "train", pixels, None).border_mean() == 0
    pixels[:, 0] = 140  # 4 of the 14 border pixels
    pixels[1000] = 255  # only the first 1,000 images count
    assert ImageSet("x", "train", pixels, None).border_mean() == pytest.approx(40)
    assert ImageSet("x", "train", np.full((1, 1, 2, 1), 7, np.uint8), None).border_mean() == 7
    assert load_images("glyphs", "test").border_mean() < 5


@pytest.mark.skipif(REAL_DATA is None, reason="LINTX_DATA is not set")
@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_real_grey_sets_can_be_loaded(name: str) -> None:
    sizes = {"train": 55_000, "validation": 5_000, "test": 10_000}
    found = {split: load_images(name, split, data_dir=REAL_DATA) for split in SPLITS}
    for split, images in found.items():
        assert images.images.shape == (sizes[split], 28, 28, 1)
        assert images.labels is not None
        assert set(images.labels) == set(range(10))
        assert images.border_mean() < 20
    first_labels = {"mnist": [5, 0, 4, 1, 9], "fashion-mnist": [9, 0, 0, 3, 0]}
    assert found["train"].labels is not None
    assert found["train"].labels[:5].tolist() == first_labels[name]


@pytest.mark.skipif(
    not (REAL_DATA and Path(REAL_DATA, "cifar10", "train-images.npy").exists()),
    reason="LINTX_DATA holds no cifar10/train-images.npy",
)
def test_real_colour_arrays_can_be_loaded() -> None:
    validation = load_images(f"array:{REAL_DATA}/cifar10", "validation")
    assert validation.images.shape == (5_000, 32, 32, 3)
    assert validation.labels is not None
    assert set(validation.labels) == set(range(10))


# Classes


def test_a_set_knows_how_many_classes_it_has(tmp_path: Path) -> None:
    assert load_images("glyphs", "train", image_size=8).classes == 62
    np.save(tmp_path / "train-images.npy", np.zeros((20, 4, 4), np.uint8))
    assert load_images(f"array:{tmp_path}", "train").classes == 0
    # The last tenth is for validation. A class that appears only in that tenth counts for both splits.
    np.save(tmp_path / "train-labels.npy", np.array([0, 1] * 9 + [3, 4]))
    for split in ("train", "validation"):
        assert load_images(f"array:{tmp_path}", split).classes == 5  # type: ignore[arg-type]


def test_labels_must_be_classes_of_the_model(raises_one_line) -> None:
    pixels = np.zeros((3, 2, 2, 1), np.uint8)
    labels = np.array([0, 2, 1])
    assert ImageSet("x", "train", pixels, labels).require_labels(3) is labels
    with raises_one_line(DataError, "'x' has labels 0 to 2; the model has classes 0 to 1"):
        ImageSet("x", "train", pixels, labels).require_labels(2)
    with raises_one_line(DataError, "'x' has labels -1 to 1"):
        ImageSet("x", "train", pixels, labels - 1).require_labels(3)
    with raises_one_line(DataError, "'x' has no labels"):
        ImageSet("x", "train", pixels, None).require_labels(3)
