"""A folder of the user's own pictures as a data set: decoded once into a file that is mapped into memory."""

import contextlib
import hashlib
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
from PIL import Image

from linformer_cli.config import ImageShape, parse_config
from linformer_cli.errors import DataError

from .pictures import load_picture

DEFAULT_FOLDER_SIZE = 32
# One part in ten for testing, one in ten for validation.
_HELD_OUT = 10
_SPLITS = ("train", "validation", "test")
# What data sets call the folders of their splits, in any case.
_SPLIT_FOLDERS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation"), "validation"),
    **dict.fromkeys(("test", "testing"), "test"),
}
# Goes up when the same folder is split, ordered, read or kept in another way: what was kept before is made anew then.
_CACHE_VERSION = 4
_IMAGES = "images.bin"
_LEFTOVER_SECONDS = 24 * 60 * 60


@dataclass(frozen=True)
class FolderImages:
    """The pictures of one split: images uint8 [N, H, W, C], a read-only view of a file; labels int64 [N] or None.

    `classes` is how many there are in all splits, 0 where folders do not tell.
    `skipped` names the files that look like pictures and the folders that cannot be read, each with the reason.
    """

    images: NDArray[np.uint8]
    labels: NDArray[np.int64] | None
    skipped: tuple[str, ...]
    classes: int


def load_folder(
    folder: Path, splits: Sequence[str], image_size: int | None, channels: int | None, cache: Path
) -> list[FolderImages]:
    """The pictures of each of `splits` in `folder`, in any depth, cropped around the middle and resized.

    They have `image_size` (32) pixels a side. `channels` is 1 (grey) or 3 (RGB); None takes RGB as soon as one picture
    is coloured. Pictures that lie in at least two folders directly under `folder` are labelled by these, in the order
    of their names. One picture in ten, chosen by the digest of its name, is for testing, and as many are for
    validation, unless the folder brings them: beside `train/`, what lies in `test/` and in `val/` (or `valid/` or
    `validation/`) is for that alone, and the classes are the folders in these. Links to folders are followed.
    Training pictures are in the order of their names, the others in that of the digests, so that the first of
    them are of all classes. Both orders depend on names alone: a seed means the same everywhere.

    Decoded images are kept below `cache` and made anew when a name, size or date in the folder changes. Raises
    `DataError` where there is no folder, or fewer than three readable pictures in it, `UsageError` for an `image_size`
    that gives larger images than a model can have.
    """
    files, unread = _list_pictures(folder)
    side = image_size or DEFAULT_FOLDER_SIZE
    key = hashlib.sha256(os.fsencode(f"{folder.resolve()} {side} {channels}")).hexdigest()[:16]
    fingerprint = _fingerprint(folder, files)
    # A name of its own for every state of the folder: where files in use cannot go, none has to be replaced.
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
            raise DataError(f"{folder} holds no readable picture for '{split}'; add some")
        # The splits lie one after the other in the file, so that each is a view of it.
        start = sum(len(names[before]) for before in _SPLITS[: _SPLITS.index(split)])
        labels = None if classes is None else np.array([classes[class_of[name]] for name in names[split]], np.int64)
        images = whole[start : start + len(names[split])]
        found.append(FolderImages(images, labels, (*unread, *index["skipped"]), len(classes or ())))
    return found


def _list_pictures(folder: Path) -> tuple[list[str], list[str]]:
    """Paths below `folder`, with `/`, of all files with the ending of a picture, sorted; and what cannot be read.

    Hidden ones are left out. Raises `DataError` where `folder` itself cannot be read.
    """
    endings = {ending for ending, kind in Image.registered_extensions().items() if kind in Image.OPEN}
    found, unread = [], []
    # Each folder to read, with the identities of the folders above it: a link to one of these is not followed. A list
    # and not a recursion, which Python limits to a depth of about 1,000.
    waiting: list[tuple[Path, frozenset[tuple[int, int]]]] = [(folder, frozenset())]
    while waiting:
        place, above = waiting.pop()
        try:
            status = place.stat()
            if (own := (status.st_dev, status.st_ino)) in above:
                continue
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
            except OSError as error:  # such as a link to itself, which is skipped like a broken picture
                is_folder = False
                if path.suffix.lower() not in endings:
                    unread.append(f"cannot read {path} ({error.strerror or error})")
            if is_folder:
                waiting.append((path, above | {own}))
            elif path.suffix.lower() in endings:
                found.append(path.relative_to(folder).as_posix())
    return sorted(found), sorted(unread)


def _unreadable(folder: Path, error: OSError) -> DataError:
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return DataError(f"the folder {folder} does not exist; name one that holds images, as in folder:PATH")
    return DataError(f"cannot read the folder {folder} ({error.strerror or error})")


def _fingerprint(folder: Path, files: Sequence[str]) -> str:
    digest = hashlib.sha256(f"{_CACHE_VERSION}\n".encode())
    for name in files:
        try:
            status = (folder / name).stat()
            digest.update(os.fsencode(f"{name}\0{status.st_size}\0{status.st_mtime_ns}\n"))
        except OSError:  # a link to nothing, say: `_build` skips it and names it
            digest.update(os.fsencode(f"{name}\0\n"))
    return digest.hexdigest()


def _is_current(home: Path, fingerprint: str) -> bool:
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        index = json.loads((home / "index.json").read_text(encoding="utf-8"))
        whole = (home / _IMAGES).stat().st_size == math.prod(index["shape"])
        return whole and bool(index["fingerprint"] == fingerprint)
    return False


def _build(home: Path, folder: Path, files: Sequence[str], side: int, channels: int | None, fingerprint: str) -> None:
    """Decode everything into a new folder and put it in the place of an old one."""
    if len(files) < len(_SPLITS):
        raise DataError(f"{folder} holds {len(files)} pictures; at least 3 are needed, one of them for each split")
    channels = channels or (3 if any(_is_coloured(folder / name) for name in files) else 1)
    shape = parse_config(ImageShape, {"height": side, "width": side, "channels": channels}, f"--image-size {side}")
    names: dict[str, list[str]] = {split: [] for split in _SPLITS}
    skipped: list[str] = []
    try:
        home.parent.mkdir(parents=True, exist_ok=True)
        writing = Path(tempfile.mkdtemp(prefix=f".{home.name}.", dir=home.parent))
    except OSError as error:
        raise DataError(f"cannot write the cache {home.parent} ({error.strerror or error})") from None
    try:
        # Not through a map of the file into memory: where the disk is full, a write to that kills the process.
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
            raise DataError(f"{folder} holds no readable picture, {len(skipped)} broken ones; {skipped[0]}")
        sizes = [count, side, side, channels]
        index = {"fingerprint": fingerprint, "shape": sizes, "names": names, "skipped": skipped}
        (writing / "index.json").write_text(json.dumps(index), encoding="utf-8")
        shutil.rmtree(home, ignore_errors=True)
        try:
            os.rename(writing, home)
        except OSError:
            if not _is_current(home, fingerprint):  # another process may have been sooner, with the same
                raise
    except OSError as error:
        raise DataError(f"cannot write the cache {home} ({error.strerror or error})") from None
    finally:
        shutil.rmtree(writing, ignore_errors=True)


def _remove_leftovers(home: Path, key: str) -> None:
    """Remove earlier states of the folder with this `key` than `home`, and what killed processes left half-written.

    One that is alive writes on and on: what nobody has touched for a day is no one's.
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
    """Whether a picture has colours, told by a small copy: most grey scans are stored as RGB."""
    shape = ImageShape(height=16, width=16, channels=3)
    with contextlib.suppress(DataError):
        pixels = load_picture(path, shape).image.astype(np.int16)
        return bool((pixels.max(axis=2) - pixels.min(axis=2)).max() > 8)
    return False


def _split(names: Sequence[str]) -> dict[str, list[str]]:
    """The names of every split, in order. Depends on the names alone, not on which files turn out to be broken."""
    # By digest, not by name: the names often sort by class or by date. The held-out ones stay in this order, since
    # often only the first of them are looked at.
    parts: dict[str, list[str]] = {split: [] for split in _SPLITS}
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
    """The split whose folder a picture lies in, if it is called like one."""
    first, _, rest = name.partition("/")
    return _SPLIT_FOLDERS.get(first.casefold()) if rest else None


def _brings_splits(names: Sequence[str]) -> bool:
    """Whether there is a folder for training and one to hold against it; a class may be called `train`, too."""
    found = set(map(_split_folder, names))
    return "train" in found and not found.isdisjoint({"validation", "test"})


def _class_of_each(names: Sequence[str]) -> dict[str, str]:
    """The folder that each picture lies in, "" for none; a split's own folder is no class."""
    own = _brings_splits(names) or all(map(_split_folder, names))
    within = {name: name.partition("/")[2] if own and _split_folder(name) else name for name in names}
    return {name: rest.rpartition("/")[0].partition("/")[0] for name, rest in within.items()}


def _number_classes(names: Iterable[str]) -> dict[str, int] | None:
    """The numbers of the classes, by name; None where folders do not tell."""
    found = sorted(set(names))
    return {name: index for index, name in enumerate(found)} if len(found) > 1 and "" not in found else None
