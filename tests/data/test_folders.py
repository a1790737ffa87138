"""Tests of folders of images as data sets."""

import errno
import io
import os
import shutil
import subprocess
import sys
import traceback
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from linformer_cli.config import DataConfig
from linformer_cli.data import SPLITS, folders
from linformer_cli.data.folders import FolderImages, load_folder
from linformer_cli.data.images import load_for_training, load_images
from linformer_cli.errors import DataError, UsageError


def write_pictures(folder: Path, count: int, seed: int = 0, colour: bool = True) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(seed)
    for index in range(count):
        pixels = generator.integers(0, 256, (12, 9, 3), dtype=np.uint8)
        if not colour:
            pixels[:] = pixels[..., :1]
        Image.fromarray(pixels).save(folder / f"{index:03d}.png")


def load(folder: Path, split: str, image_size: int | None, channels: int | None, cache: Path) -> FolderImages:
    size = None if image_size is None else (image_size, image_size)
    return load_folder(folder, [split], DataConfig(image_size=size, channels=channels), None, cache)[0]


def count_classes(part: FolderImages) -> int:
    return len(part.look.class_names)


def list_skipped(part: FolderImages) -> list[str]:
    return list(part.skipped)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def test_splits_are_disjoint_and_complete(tmp_path: Path, cache: Path) -> None:
    write_pictures(tmp_path / "pictures" / "deep" / "deeper", 30)
    parts = {split: load(tmp_path / "pictures", split, 8, None, cache).images for split in SPLITS}
    assert {split: len(images) for split, images in parts.items()} == {"train": 24, "validation": 3, "test": 3}
    whole = np.concatenate(list(parts.values())).reshape(30, -1)
    assert whole.shape[1] == 8 * 8 * 3 and len(np.unique(whole, axis=0)) == 30


def test_train_and_test_folders_may_have_class_folders(tmp_path: Path, cache: Path) -> None:
    for name, count in (("train/cat", 9), ("train/dog", 11), ("test/cat", 2), ("test/dog", 3)):
        write_pictures(tmp_path / "pictures" / name, count, seed=count)
    test = load(tmp_path / "pictures", "test", 8, None, cache)
    assert test.labels is not None and sorted(test.labels) == [0, 0, 1, 1, 1]
    train = load(tmp_path / "pictures", "train", 8, None, cache)
    validation = load(tmp_path / "pictures", "validation", 8, None, cache)
    assert len(train.images) + len(validation.images) == 20 and len(validation.images) == 2
    assert {count_classes(part) for part in (train, validation, test)} == {2}


def test_a_validation_folder_is_not_a_class_and_is_not_used_for_training(tmp_path: Path, cache: Path) -> None:
    counts = {"Train/cat": 12, "Train/dog": 8, "VAL/cat": 2, "VAL/dog": 3}
    for name, count in counts.items():
        write_pictures(tmp_path / "pictures" / name, count, seed=count)
    parts = {split: load(tmp_path / "pictures", split, 8, None, cache) for split in SPLITS}
    assert {split: len(part.images) for split, part in parts.items()} == {"train": 18, "validation": 5, "test": 2}
    assert {count_classes(part) for part in parts.values()} == {2}
    assert sorted(parts["validation"].labels) == [0, 0, 1, 1, 1]
    write_pictures(tmp_path / "pictures" / "test" / "dog", 7, seed=1)
    parts = {split: load(tmp_path / "pictures", split, 8, None, cache) for split in SPLITS}
    assert {split: len(part.images) for split, part in parts.items()} == {"train": 20, "validation": 5, "test": 7}
    assert set(parts["test"].labels) == {1}


def test_a_class_may_be_named_like_a_split(tmp_path: Path, cache: Path) -> None:
    for name in ("train", "car"):
        write_pictures(tmp_path / "pictures" / name, 10, seed=len(name))
    parts = [load(tmp_path / "pictures", split, 8, None, cache) for split in SPLITS]
    assert [len(part.images) for part in parts] == [16, 2, 2] and count_classes(parts[0]) == 2


def test_class_folders_may_be_links_and_cycles_are_not_followed(tmp_path: Path, cache: Path) -> None:
    write_pictures(tmp_path / "pictures" / "dog", 6)
    write_pictures(tmp_path / "elsewhere", 4, seed=1)
    (tmp_path / "pictures" / "cat").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "again").symlink_to(tmp_path / "pictures")
    parts = [load(tmp_path / "pictures", split, 8, None, cache) for split in SPLITS]
    assert sum(len(part.images) for part in parts) == 10
    assert {count_classes(part) for part in parts} == {2}


def test_folders_that_link_to_each_other_are_read_once(tmp_path: Path, cache: Path) -> None:
    for name in ("cat", "dog"):
        write_pictures(tmp_path / "pictures" / name, 20)
    for name, other in (("cat", "dog"), ("dog", "cat")):
        (tmp_path / "pictures" / name / "a link").symlink_to(tmp_path / "pictures" / other)
    (tmp_path / "pictures" / "a link to cat").symlink_to(tmp_path / "pictures" / "cat")
    parts = [load(tmp_path / "pictures", split, 8, None, cache) for split in SPLITS]
    assert sum(len(part.images) for part in parts) == 40
    assert count_classes(parts[0]) == 2  # the real folders, not the link


def test_an_empty_split_names_a_broken_picture(tmp_path: Path, cache: Path) -> None:
    write_pictures(tmp_path / "pictures", 10)
    for path in (tmp_path / "pictures").iterdir():
        whole = path.read_bytes()
        path.write_bytes(b"broken")
        try:
            load_folder(tmp_path / "pictures", SPLITS, DataConfig(), None, cache)
        except DataError as error:
            assert path.name in str(error)
            return
        path.write_bytes(whole)
    pytest.fail("one of ten pictures is for validation")


def test_an_unreadable_folder_is_skipped_and_reported(tmp_path: Path, cache: Path, monkeypatch) -> None:
    scandir = os.scandir

    def scan(place: Path):
        if Path(place).name == "locked":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return scandir(place)

    write_pictures(tmp_path / "pictures", 6)
    write_pictures(tmp_path / "pictures" / "locked", 6, seed=1)
    monkeypatch.setattr(os, "scandir", scan)
    part = load(tmp_path / "pictures", "train", 8, None, cache)
    assert len(part.images) == 4
    (line,) = list_skipped(part)
    assert "locked (Permission denied)" in line


@pytest.mark.parametrize("own", [False, True])
def test_the_first_held_out_images_cover_all_classes(tmp_path: Path, cache: Path, own: bool) -> None:
    parts = ("train/", "test/") if own else ("",)
    for number, name in enumerate("abcd"):
        for folder in parts:
            write_pictures(tmp_path / "pictures" / f"{folder}{name}", 60, seed=number)
    for split in ("validation", "test"):
        labels = load(tmp_path / "pictures", split, 4, 1, cache).labels
        assert labels is not None and len(labels) >= 24 and set(labels[:12]) == {0, 1, 2, 3}
    labels = load(tmp_path / "pictures", "train", 4, 1, cache).labels
    assert labels is not None and labels.tolist() == sorted(labels)


def test_a_test_folder_does_not_change_the_size_of_validation(tmp_path: Path, cache: Path) -> None:
    write_pictures(tmp_path / "pictures" / "train", 20)
    write_pictures(tmp_path / "pictures" / "test", 60, seed=1)
    found = [len(load(tmp_path / "pictures", split, 4, 1, cache).images) for split in SPLITS]
    assert found == [18, 2, 60]


def test_images_without_class_folders_have_no_labels(tmp_path: Path, cache: Path) -> None:
    write_pictures(tmp_path / "one", 5)
    unlabelled = load(tmp_path, "train", 8, None, cache)
    assert unlabelled.labels is None and count_classes(unlabelled) == 0
    write_pictures(tmp_path / "two", 5, seed=1)
    assert load(tmp_path, "train", 8, None, cache).labels is not None


def test_grey_is_detected_and_can_be_requested(tmp_path: Path, cache: Path) -> None:
    write_pictures(tmp_path / "grey", 4, colour=False)
    write_pictures(tmp_path / "coloured", 4)
    channels = [load(tmp_path / name, "train", 8, None, cache).images.shape[3] for name in ("grey", "coloured")]
    assert channels == [1, 3]
    assert load(tmp_path / "coloured", "train", 8, 1, cache).images.shape[3] == 1


def test_broken_files_are_reported_and_do_not_change_the_splits(tmp_path: Path, cache: Path) -> None:
    write_pictures(tmp_path / "pictures", 20)
    before = load(tmp_path / "pictures", "train", 8, None, cache)
    names_seen = len(before.images)
    broken = tmp_path / "pictures" / "000.png"
    broken.write_text("not an image")
    after = load(tmp_path / "pictures", "train", 8, None, cache)
    assert len(list_skipped(after)) == 1 and "000.png" in list_skipped(after)[0]
    rows = {image.tobytes() for image in before.images}
    assert len(after.images) >= names_seen - 1 and all(image.tobytes() in rows for image in after.images)


def test_a_broken_link_is_skipped_and_reported(tmp_path: Path, cache: Path) -> None:
    write_pictures(tmp_path / "pictures", 20)
    target, link = tmp_path / "elsewhere.png", tmp_path / "pictures" / "link.png"
    link.symlink_to(target)
    found = [load(tmp_path / "pictures", split, 8, 3, cache) for split in SPLITS]
    assert sum(len(part.images) for part in found) == 20
    (line,) = list_skipped(found[0])
    assert "no image at" in line and "link.png" in line
    Image.new("RGB", (9, 9)).save(target)
    found = [load(tmp_path / "pictures", split, 8, 3, cache) for split in SPLITS]
    assert sum(len(part.images) for part in found) == 21 and not list_skipped(found[0])


def test_a_link_to_itself_is_skipped_and_reported(tmp_path: Path, cache: Path) -> None:
    write_pictures(tmp_path / "pictures" / "deep", 20)
    for name in ("folder", "picture.png", "deep/inner"):
        (tmp_path / "pictures" / name).symlink_to(tmp_path / "pictures" / name)
    found = [load(tmp_path / "pictures", split, 8, 3, cache) for split in SPLITS]
    assert sum(len(part.images) for part in found) == 20
    (line,) = list_skipped(found[0])
    assert "3 files skipped" in line and "symbolic links" in line


def test_folders_may_be_very_deep(tmp_path: Path, cache: Path) -> None:
    write_pictures(tmp_path / "pictures", 6)
    deep = str(tmp_path / "pictures")
    limit = len([*traceback.walk_stack(None)]) + 300
    for _ in range(limit):  # mkdir(parents=True) would recurse too deeply
        deep += "/d"
        os.mkdir(deep)
    write_pictures(Path(deep), 6, seed=1)
    load(tmp_path / "pictures", "train", 9, 3, cache)
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(limit)
    try:
        parts = load_folder(tmp_path / "pictures", SPLITS, DataConfig(image_size=(8, 8)), None, cache)
        assert sum(len(part.images) for part in parts) == 12
    finally:
        sys.setrecursionlimit(before)
        subprocess.run(["rm", "-rf", str(tmp_path / "pictures")], check=True)  # too deep for pytest to remove


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not allow such names")
def test_names_need_not_be_utf8(tmp_path: Path, cache: Path) -> None:
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/f\xfcr"))
    write_pictures(folder, 12)
    os.rename(folder / "000.png", os.fsencode(folder) + b"/\xff.png")
    assert sum(len(load(folder, split, 8, None, cache).images) for split in SPLITS) == 12


def test_a_folder_may_change_while_its_images_are_in_use(tmp_path: Path, cache: Path, monkeypatch) -> None:
    """The old cache cannot be deleted here, as on a network file system while its files are mapped."""
    write_pictures(tmp_path / "pictures", 10)
    before = load(tmp_path / "pictures", "train", 8, None, cache).images
    known, removed = before.tolist(), []
    rmtree = shutil.rmtree
    monkeypatch.setattr(
        folders.shutil,
        "rmtree",
        lambda path, **more: removed.append(path) if Path(path).parent == cache else rmtree(path, **more),
    )
    write_pictures(tmp_path / "pictures", 20, seed=1)
    assert len(load(tmp_path / "pictures", "train", 8, None, cache).images) == 16
    assert before.tolist() == known and removed


def test_two_processes_may_prepare_the_same_folder(tmp_path: Path, cache: Path, monkeypatch) -> None:
    """The other process writes its cache just before this one renames its own."""
    write_pictures(tmp_path / "pictures", 12)
    rename = os.rename

    def be_late(source: Path, target: Path) -> None:
        shutil.copytree(source, target)
        rename(source, target)

    monkeypatch.setattr(os, "rename", be_late)
    assert len(load(tmp_path / "pictures", "train", 8, None, cache).images) == 10


def test_images_are_decoded_again_only_if_the_folder_changes(tmp_path: Path, cache: Path, monkeypatch) -> None:
    decoded: list[Path] = []
    read_frames = folders.read_frames

    def counting(path):
        decoded.append(path)
        return read_frames(path)

    monkeypatch.setattr(folders, "read_frames", counting)
    write_pictures(tmp_path / "pictures", 10)
    for split in SPLITS:
        images = load(tmp_path / "pictures", split, 8, 3, cache).images
        assert isinstance(images, np.memmap) and not images.flags.writeable
    assert len(decoded) == 20  # once to measure the look, once to read the images
    os.utime(tmp_path / "pictures" / "003.png", (1, 1))
    load(tmp_path / "pictures", "train", 8, 3, cache)
    assert len(decoded) == 40
    assert [path.name for path in cache.iterdir()] == [next(cache.iterdir()).name]  # there is no partial cache


def test_a_full_disk_gives_a_one_line_error_and_leaves_no_files(
    tmp_path: Path, cache: Path, monkeypatch, raises_one_line
) -> None:
    class FullDisk(io.BytesIO):
        def write(self, _data: object) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    write_pictures(tmp_path / "pictures", 10)
    monkeypatch.setattr(folders, "open", lambda *_: FullDisk(), raising=False)
    with raises_one_line(DataError, "cannot write the cache", "No space left on device"):
        load(tmp_path / "pictures", "train", 8, 3, cache)
    assert list(cache.iterdir()) == []


def test_a_truncated_cache_is_rebuilt(tmp_path: Path, cache: Path) -> None:
    write_pictures(tmp_path / "pictures", 10)
    before = load(tmp_path / "pictures", "train", 8, 3, cache).images.tolist()
    (file,) = cache.glob("*/images.bin")
    os.truncate(file, 100)
    assert load(tmp_path / "pictures", "train", 8, 3, cache).images.tolist() == before


def test_partial_caches_of_killed_processes_are_removed_and_those_of_running_ones_are_kept(
    tmp_path: Path, cache: Path
) -> None:
    write_pictures(tmp_path / "pictures", 10)
    load(tmp_path / "pictures", "train", 8, 3, cache)
    (home,) = cache.iterdir()
    dead, alive = (cache / f".{home.name}.{name}" for name in ("dead", "alive"))
    for folder in (dead, alive):
        folder.mkdir()
        (folder / "images.bin").write_bytes(b"half")
        os.utime(folder, (1, 1))  # started long ago
    os.utime(dead / "images.bin", (1, 1))
    os.utime(tmp_path / "pictures" / "003.png", (1, 1))
    load(tmp_path / "pictures", "train", 8, 3, cache)
    (now,) = (folder for folder in cache.iterdir() if not folder.name.startswith("."))
    assert now != home and set(cache.iterdir()) == {now, alive}


def test_training_lists_a_folder_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LINTX_CACHE", str(tmp_path / "cache"))
    write_pictures(tmp_path / "pictures", 20)
    listed, scandir = [], os.scandir
    monkeypatch.setattr(os, "scandir", lambda place: listed.append(place) or scandir(place))
    name = f"folder:{tmp_path / 'pictures'}"
    found = load_for_training(DataConfig(name=name, image_size=8))
    assert listed.count(tmp_path / "pictures") == 1
    for images in found:
        assert np.array_equal(images.images, load_images(name, images.split, image_size=8).images)


@pytest.mark.parametrize("count", [0, 2])
def test_a_folder_with_too_few_images_is_refused(tmp_path: Path, cache: Path, count: int) -> None:
    write_pictures(tmp_path / "pictures", count)
    with pytest.raises(DataError, match=f"has {count} .*images?; at least 3"):
        load(tmp_path / "pictures", "train", 8, None, cache)


def test_a_size_that_is_too_large_only_in_colour_is_refused(tmp_path: Path, cache: Path, raises_one_line) -> None:
    write_pictures(tmp_path / "pictures", 3)
    with raises_one_line(UsageError, "--image-size 600: an image can have at most 1,048,576 values, found 1,080,000"):
        load(tmp_path / "pictures", "train", 600, None, cache)
    assert not cache.exists()
    assert load(tmp_path / "pictures", "train", 600, 1, cache).images.shape[1:] == (600, 600, 1)


def test_a_folder_with_only_broken_images_is_refused(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "pictures").mkdir()
    for index in range(4):
        (tmp_path / "pictures" / f"{index}.jpg").write_bytes(b"")
    with pytest.raises(DataError, match="no readable image, and 4 broken files"):
        load(tmp_path / "pictures", "train", 8, 3, cache)
    assert not cache.exists()


def test_a_folder_is_loaded_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LINTX_CACHE", str(tmp_path / "cache"))
    write_pictures(tmp_path / "pictures", 6)
    for number in range(7):
        (tmp_path / "pictures" / f"broken{number}.png").write_text("not an image")
    Image.new("L", (110, 8)).save(tmp_path / "pictures" / "wide.png")
    (tmp_path / "pictures" / "notes.txt").write_text("a text")
    found = load_images(f"folder:{tmp_path / 'pictures'}", "train", image_size=16, channels=3)
    assert found.images.shape[1:] == (16, 16, 3)
    (line,) = list_skipped(found)
    assert line.count("broken") == 5 and "broken0.png" in line and line.endswith("; and 2 more")
    assert any("far larger than the others" in note and note.endswith(": wide.png") for note in found.notes)
    assert any("1 file ignored" in note and "notes.txt" in note for note in found.notes)
    with pytest.raises(DataError, match="nowhere does not exist; pass a folder"):
        load_images(f"folder:{tmp_path / 'nowhere'}", "train")
    with pytest.raises(DataError, match=r"notes.txt is not a folder; pass a folder"):
        load_images(f"folder:{tmp_path / 'pictures' / 'notes.txt'}", "train")
    with pytest.raises(UsageError, match="needs a folder"):
        load_images("folder:", "train")
    with pytest.raises(UsageError, match="--channels 3"):
        load_images("glyphs", "train", channels=3)
