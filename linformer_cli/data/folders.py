"""A folder of the user's own images as a data set, decoded once into a file that is memory-mapped."""

import contextlib
import hashlib
import heapq
import json
import math
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from linformer_cli.config import ImageShape
from linformer_cli.documents import parse_config
from linformer_cli.errors import DataError

from . import SPLITS, Split
from .pictures import list_endings, load_picture

DEFAULT_FOLDER_SIZE = 32
# One image in ten is for testing, and one in ten for validation.
_HELD_OUT = 10
# Common names of split folders, in lower case.
_SPLIT_FOLDERS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation"), "validation"),
    **dict.fromkeys(("test", "testing"), "test"),
}
# Increase this number when folders are split, ordered, decoded or stored differently. It invalidates older caches.
CACHE_VERSION = 5
_IMAGES = "images.bin"
_LEFTOVER_SECONDS = 24 * 60 * 60


@dataclass(frozen=True)
class FolderImages:
    """The images of one split: uint8 [N, H, W, C], a read-only view of a file; labels int64 [N] or None.

    `classes` is the number of classes in all splits, or 0 if there are no class folders. `skipped` names the images and
    folders that cannot be read, each with the reason.
    """

    images: NDArray[np.uint8]
    labels: NDArray[np.int64] | None
    skipped: tuple[str, ...]
    classes: int


def load_folder(
    folder: Path, splits: Sequence[Split], image_size: int | None, channels: int | None, cache: Path
) -> list[FolderImages]:
    """Load the images of each of `splits` in `folder` and its subfolders, cropped to a square and resized.

    The squares are `image_size` (default: 32) pixels wide. `channels` is 1 (grey) or 3 (RGB); None means RGB if any
    image is coloured. If all images are in two or more folders directly under `folder`, these folders are the classes,
    sorted by name.

    If `folder` contains `train/` and also `test/` or `val/` (or `valid/`, `validation/`), these folders are the splits,
    and the folders inside them are the classes. A split without a folder is a tenth of the remaining images, chosen by
    the digest of their names. Links to folders are followed, but each folder is read only once. Training images are
    sorted by name. Validation and test images are sorted by digest, so that the first of them usually cover all
    classes. Both orders depend only on the names, so training with the same seed uses the images in the same order on
    every machine.

    Decoded images are cached in `cache` until a name, size or date in the folder changes. Raises `DataError` if the
    folder is missing, has fewer than three image files, or has no readable image for a split. Raises `UsageError` if
    `image_size` is too large for a model.
    """
    files, unread = _list_pictures(folder)
    side = image_size or DEFAULT_FOLDER_SIZE
    key = hashlib.sha256(os.fsencode(f"{folder.resolve()} {side} {channels}")).hexdigest()[:16]
    fingerprint = _fingerprint(folder, files)
    # Each state of the folder has its own cache name, because some systems cannot replace files in use.
    home = cache / f"{key}-{fingerprint[:8]}"
    if not _is_current(home, fingerprint):
        _build(home, folder, files, side, channels, fingerprint)
        _remove_leftovers(home, key)
    index = json.loads((home / "index.json").read_text(encoding="utf-8"))
    names: dict[str, list[str]] = index["names"]
    class_of = _class_of_each([name for part in names.values() for name in part])
    classes = _number_classes(class_of.values())
    whole = np.memmap(home / _IMAGES, dtype=np.uint8, mode="r", shape=tuple(index["shape"]))
    found = []
    for split in splits:
        if not names[split]:
            skipped = index["skipped"]
            broken = f"; {len(skipped)} cannot be read, the first: {skipped[0]}" if skipped else ""
            raise DataError(f"{folder} has no readable image for '{split}'; add some{broken}")
        # The splits are adjacent in the file, so that each is a view of it.
        start = sum(len(names[before]) for before in SPLITS[: SPLITS.index(split)])
        labels = None if classes is None else np.array([classes[class_of[name]] for name in names[split]], np.int64)
        images = whole[start : start + len(names[split])]
        found.append(FolderImages(images, labels, (*unread, *index["skipped"]), len(classes or ())))
    return found


def _list_pictures(folder: Path) -> tuple[list[str], list[str]]:
    """Return the relative paths of all image files below `folder`, and messages about what cannot be read.

    Paths use `/`, and both lists are sorted. Image files are recognised by their extension. Hidden files and folders
    are left out. Raises `DataError` if `folder` itself cannot be read.
    """
    endings = list_endings()
    found, unread = [], []
    # Each folder is read once. Folders come before links, so that a folder is read under its own name, and the order
    # does not depend on the file system.
    waiting, seen = [(False, folder)], set()
    while waiting:
        _, place = heapq.heappop(waiting)
        try:
            status = place.stat()
            if (identity := (status.st_dev, status.st_ino)) in seen:
                continue
            seen.add(identity)
            with os.scandir(place) as opened:
                entries = [entry for entry in opened if not entry.name.startswith(".")]
        except OSError as error:
            if place == folder:
                raise _unreadable(folder, error) from None
            unread.append(f"cannot read the folder {place} ({error.strerror or error})")
            continue
        for entry in entries:
            path = place / entry.name
            try:
                is_folder = entry.is_dir()
            except OSError as error:  # for example, a link to itself; it is skipped like a broken image
                is_folder = False
                if path.suffix.lower() not in endings:
                    unread.append(f"cannot read {path} ({error.strerror or error})")
            if is_folder:
                heapq.heappush(waiting, (entry.is_symlink(), path))
            elif path.suffix.lower() in endings:
                found.append(path.relative_to(folder).as_posix())
    return sorted(found), sorted(unread)


def _unreadable(folder: Path, error: OSError) -> DataError:
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        found = "is not a folder" if folder.exists() else "does not exist"
        return DataError(f"{folder} {found}; pass a folder that holds images, as in folder:PATH")
    return DataError(f"cannot read the folder {folder} ({error.strerror or error})")


def _fingerprint(folder: Path, files: Sequence[str]) -> str:
    digest = hashlib.sha256(f"{CACHE_VERSION}\n".encode())
    for name in files:
        try:
            status = (folder / name).stat()
            digest.update(os.fsencode(f"{name}\0{status.st_size}\0{status.st_mtime_ns}\n"))
        except OSError:  # for example, a broken link; `_build` skips and reports it
            digest.update(os.fsencode(f"{name}\0\n"))
    return digest.hexdigest()


def _is_current(home: Path, fingerprint: str) -> bool:
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        index = json.loads((home / "index.json").read_text(encoding="utf-8"))
        whole = (home / _IMAGES).stat().st_size == math.prod(index["shape"])
        return whole and bool(index["fingerprint"] == fingerprint)
    return False


def _build(home: Path, folder: Path, files: Sequence[str], side: int, channels: int | None, fingerprint: str) -> None:
    """Decode all images into a new folder, then rename it to `home`."""
    if len(files) < len(SPLITS):
        raise DataError(f"{folder} has {len(files)} images; at least 3 are needed, one for each split")
    channels = channels or (3 if any(_is_coloured(folder / name) for name in files) else 1)
    shape = parse_config(ImageShape, {"height": side, "width": side, "channels": channels}, f"--image-size {side}")
    names: dict[str, list[str]] = {split: [] for split in SPLITS}
    skipped: list[str] = []
    try:
        home.parent.mkdir(parents=True, exist_ok=True)
        writing = Path(tempfile.mkdtemp(prefix=f".{home.name}.", dir=home.parent))
    except OSError as error:
        raise DataError(f"cannot write the cache {home.parent} ({error.strerror or error})") from None
    try:
        # The file is not memory-mapped here, because writing to a mapped file on a full disk kills the process.
        with open(writing / _IMAGES, "wb") as file:
            for split, chosen in _split(files).items():
                for name in chosen:
                    try:
                        image = load_picture(folder / name, shape).image
                    except DataError as error:
                        skipped.append(str(error))
                        continue
                    file.write(image.tobytes())
                    names[split].append(name)
            file.flush()
            os.fsync(file.fileno())
        count = sum(map(len, names.values()))
        if not count:
            raise DataError(f"{folder} has no readable image, and {len(skipped)} broken ones; {skipped[0]}")
        sizes = [count, side, side, channels]
        index = {"fingerprint": fingerprint, "shape": sizes, "names": names, "skipped": skipped}
        (writing / "index.json").write_text(json.dumps(index), encoding="utf-8")
        shutil.rmtree(home, ignore_errors=True)
        try:
            os.rename(writing, home)
        except OSError:
            if not _is_current(home, fingerprint):  # otherwise another process has just written the same images
                raise
    except OSError as error:
        raise DataError(f"cannot write the cache {home} ({error.strerror or error})") from None
    finally:
        shutil.rmtree(writing, ignore_errors=True)


def _remove_leftovers(home: Path, key: str) -> None:
    """Remove caches of earlier states of the folder with this `key`, and partial caches of killed processes.

    A partial cache that has not changed for a day is assumed to belong to a killed process.
    """
    for folder in home.parent.glob(f"{key}*"):
        if folder != home:
            shutil.rmtree(folder, ignore_errors=True)
    for folder in home.parent.glob(f".{key}*"):
        with contextlib.suppress(OSError):
            touched = max(path.stat().st_mtime for path in (folder, *folder.iterdir()))
            if time.time() - touched > _LEFTOVER_SECONDS:
                shutil.rmtree(folder, ignore_errors=True)


def _is_coloured(path: Path) -> bool:
    """Whether a small copy of the image has colours. The file's mode is unreliable: many grey scans are RGB files."""
    shape = ImageShape(height=16, width=16, channels=3)
    with contextlib.suppress(DataError):
        pixels = load_picture(path, shape).image.astype(np.int16)
        return bool((pixels.max(axis=2) - pixels.min(axis=2)).max() > 8)
    return False


def _split(names: Sequence[str]) -> dict[str, list[str]]:
    """Return the names in each split, in order. A split depends only on names, so a broken file changes no split."""
    # Images are chosen by digest, because names often sort by class or by date. Validation and test images keep the
    # order of their digests, because often only the first of them are used.
    parts: dict[str, list[str]] = {split: [] for split in SPLITS}
    own = _brings_splits(names)
    for name in sorted(names, key=lambda name: hashlib.sha256(os.fsencode(name)).digest()):
        parts[(own and _split_folder(name)) or "train"].append(name)
    held_out = max(1, len(parts["train"]) // _HELD_OUT)
    for split in ("test", "validation"):
        if not parts[split]:
            parts[split], parts["train"] = parts["train"][:held_out], parts["train"][held_out:]
    parts["train"].sort()
    return parts


def _split_folder(name: str) -> str | None:
    """Return the split that a file's top folder is named after, or None."""
    first, _, rest = name.partition("/")
    return _SPLIT_FOLDERS.get(first.casefold()) if rest else None


def _brings_splits(names: Sequence[str]) -> bool:
    """Whether there are folders for training and for another split. A folder `train` alone may be a class."""
    found = set(map(_split_folder, names))
    return "train" in found and not found.isdisjoint({"validation", "test"})


def _class_of_each(names: Sequence[str]) -> dict[str, str]:
    """Return the class folder of each file, or "" if there is none. The folder of a split is not a class."""
    own = _brings_splits(names) or all(map(_split_folder, names))
    within = {name: name.partition("/")[2] if own and _split_folder(name) else name for name in names}
    return {name: rest.rpartition("/")[0].partition("/")[0] for name, rest in within.items()}


def _number_classes(names: Iterable[str]) -> dict[str, int] | None:
    """The numbers of the classes by name, or None unless every file is in one of several class folders."""
    found = sorted(set(names))
    return {name: index for index, name in enumerate(found)} if len(found) > 1 and "" not in found else None
