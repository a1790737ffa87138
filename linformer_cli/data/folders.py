"""A folder of the user's own pictures as a data set: decoded once into a file that is mapped into memory."""

import contextlib
import hashlib
import json
import math
import os
import shutil
import tempfile
import time
from collections.abc import Sequence
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
# Goes up when the same folder is split, ordered, read or kept in another way: what was kept before is made anew then.
_CACHE_VERSION = 3
_IMAGES = "images.bin"
_LEFTOVER_SECONDS = 24 * 60 * 60


@dataclass(frozen=True)
class FolderImages:
    """The pictures of one split: images uint8 [N, H, W, C], a read-only view of a file; labels int64 [N] or None.

    `classes` is how many there are in all splits, 0 where folders do not tell.
    `skipped` names the files that look like pictures and cannot be read, each with the reason.
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
    validation; a folder with `train/` and `test/` brings its own split, and validation is one in ten of what is not in
    `test/`. Training pictures are in the order of their names, the others in that of the digests, so that the first of
    them are of all classes. Both orders depend on names alone: a seed means the same everywhere.

    Decoded images are kept below `cache` and made anew when a name, size or date in the folder changes. Raises
    `DataError` where there is no folder, or fewer than three readable pictures in it, `UsageError` for an `image_size`
    that gives larger images than a model can have.
    """
    try:
        files = _list_pictures(folder)
    except OSError as error:
        raise DataError(f"cannot read the folder {folder} ({error.strerror or error})") from None
    side = image_size or DEFAULT_FOLDER_SIZE
    home = cache / hashlib.sha256(f"{folder.resolve()} {side} {channels}".encode()).hexdigest()[:16]
    fingerprint = _fingerprint(folder, files)
    if not _is_current(home, fingerprint):
        _build(home, folder, files, side, channels, fingerprint)
    index = json.loads((home / "index.json").read_text(encoding="utf-8"))
    names: dict[str, list[str]] = index["names"]
    classes = _classes([name for part in names.values() for name in part])
    whole = np.memmap(home / _IMAGES, dtype=np.uint8, mode="r", shape=tuple(index["shape"]))
    found = []
    for split in splits:
        if not names[split]:
            raise DataError(f"{folder} holds no readable picture for '{split}'; add some")
        # The splits lie one after the other in the file, so that each is a view of it.
        start = sum(len(names[before]) for before in _SPLITS[: _SPLITS.index(split)])
        labels = None if classes is None else np.array([classes[_class_of(name)] for name in names[split]], np.int64)
        images = whole[start : start + len(names[split])]
        found.append(FolderImages(images, labels, tuple(index["skipped"]), len(classes or ())))
    return found


def _list_pictures(folder: Path) -> list[str]:
    """Paths below `folder`, with `/`, of all files with the ending of a picture; sorted, hidden ones left out."""
    if not folder.is_dir():
        raise DataError(f"the folder {folder} does not exist; name one that holds pictures, as in folder:PATH")
    endings = {ending for ending, kind in Image.registered_extensions().items() if kind in Image.OPEN}
    found = []
    for place, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in files:
            if not name.startswith(".") and Path(name).suffix.lower() in endings:
                found.append((Path(place) / name).relative_to(folder).as_posix())
    return sorted(found)


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
        _remove_leftovers(home)
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


def _remove_leftovers(home: Path) -> None:
    """Remove what processes that were killed while they wrote `home` left beside it.

    One that is alive writes on and on: what nobody has touched for a day is no one's.
    """
    for folder in home.parent.glob(f".{home.name}.*"):
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
    own = [name for name in names if name.startswith("test/")]
    rest = [name for name in names if not name.startswith("test/")]
    if not (own and any(name.startswith("train/") for name in rest)):
        own, rest = [], list(names)
    # By digest, not by name: the names often sort by class or by date. The held-out ones stay in this order, since
    # often only the first of them are looked at.
    for part in (own, rest):
        part.sort(key=lambda name: hashlib.sha256(os.fsencode(name)).digest())
    held_out = max(1, len(rest) // _HELD_OUT)
    if not own:
        own, rest = rest[:held_out], rest[held_out:]
    return {"train": sorted(rest[held_out:]), "validation": rest[:held_out], "test": own}


def _class_of(name: str) -> str:
    """The folder that a picture lies in, "" for none; a split's own folder is no class."""
    return name.removeprefix("train/").removeprefix("test/").rpartition("/")[0].partition("/")[0]


def _classes(names: Sequence[str]) -> dict[str, int] | None:
    """The numbers of the classes, by name; None where folders do not tell."""
    found = sorted({_class_of(name) for name in names})
    return {name: index for index, name in enumerate(found)} if len(found) > 1 and "" not in found else None
