"""A folder of the user's own images as a data set, decoded once into a file that is memory-mapped."""

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median_low
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter

from linformer_cli.config import DataConfig
from linformer_cli.errors import DataError, shorten
from linformer_cli.units import count_words
from . import SPLITS, Split
from .arrays import MappedArray
from .listing import Item, Listing, compare_classes, find_classes, list_folder, split_items
from .look import Look, Pixels
from .pictures import read_frames
from .survey import Survey, describe_sizes, sample_evenly

# Increase this number when folders are split, ordered, decoded or stored differently. It invalidates older caches.
CACHE_VERSION = 8
_IMAGES = "images.bin"
_LEFTOVER_SECONDS = 24 * 60 * 60
_MOST_NAMED = 5  # files in a line
_FAR = 8  # times the longer side of the usual picture, which may be a photograph among sprites
_LOOK = TypeAdapter(Look)


@dataclass(frozen=True)
class FolderImages:
    """The images uint8 [N, H, W, C] of one split, a view of a file, with labels int64 [N] or None, as in `ImageSet`."""

    images: NDArray[np.uint8]
    labels: NDArray[np.int64] | None
    look: Look
    notes: tuple[str, ...]
    skipped: tuple[str, ...]


def load_folder(
    folder: Path, splits: Sequence[Split], wanted: DataConfig, look: Look | None, cache: Path
) -> list[FolderImages]:
    """Load the images of each of `splits` in `folder` and its subfolders, all with the same look.

    Without a `look`, it is measured over the whole folder, with the settings in `wanted`. Every frame of a picture, and
    every tile if the look cuts tiles, is an image. The classes are named by `labels.csv`, with the columns file and
    label, or by the folders directly under `folder` if all images are in two or more of them.

    If `folder` contains `train/` and also `test/` or `val/` (or `valid/`, `validation/`), these are the splits, and the
    folders inside them the classes. A split without a folder is a tenth of the remaining images, chosen by the digest
    of their names. Copies of an image are in the same split, and so are the frames and tiles of a file if there are at
    least ten files. Links to folders are followed, but each folder is read once. Training images are sorted by name,
    the others by digest, so that the first of them usually cover all classes.

    Decoded images are cached in `cache` until a name, size or date in the folder changes. Raises `DataError` if the
    folder is missing, has fewer than three different images, has no readable image for a split, or has classes that a
    given look lacks, and `UsageError` if the images would be too large for a model.
    """
    listing = list_folder(folder)
    asked = repr(wanted.model_copy(update={"name": ""}) if look is None else dataclasses.replace(look, frame=None))
    key = hashlib.sha256(os.fsencode(f"{folder.resolve()} {asked}")).hexdigest()[:16]
    fingerprint = _fingerprint(folder, listing)
    # Each state of the folder has its own cache name, because some systems cannot replace files in use.
    home = cache / f"{key}-{fingerprint[:8]}"
    if not _is_current(home, fingerprint):
        _build(home, folder, listing, wanted, look, fingerprint)
        _remove_leftovers(home, key)
    index = json.loads((home / "index.json").read_text(encoding="utf-8"))
    own: list[str] = index["class_names"]
    look = look or _LOOK.validate_python(index["look"])
    look = dataclasses.replace(look, class_names=look.class_names or tuple(own))
    numbers = {name: number for number, name in enumerate(look.class_names)}
    whole = MappedArray(home / _IMAGES, dtype=np.uint8, mode="r", shape=tuple(index["shape"]))
    found = []
    for split in splits:
        classes: list[str] = index["classes"][split]
        if not classes:
            unread = index["skipped"]
            broken = f"; {len(unread)} cannot be read: {_list_some(unread)}" if unread else ""
            raise DataError(f"{folder} has no readable image for '{split}'; add some{broken}")
        if unknown := sorted(set(own) - numbers.keys()):
            hint = f"it knows {shorten(', '.join(numbers))}"
            raise DataError(f"{folder} has the class '{unknown[0]}', which the model lacks; {hint}")
        # The splits are adjacent in the file, so that each is a view of it.
        start = sum(len(index["classes"][before]) for before in SPLITS[: SPLITS.index(split)])
        labels = np.array([numbers[name] for name in classes]) if own else None
        skipped = note_skipped([*listing.unread, *index["skipped"]])
        found.append(FolderImages(whole[start : start + len(classes)], labels, look, tuple(index["notes"]), skipped))
    return found


def note_skipped(skipped: Sequence[str]) -> tuple[str, ...]:
    """Return a line about files that cannot be read, if there are any."""
    return (f"{count_words(len(skipped), 'file')} skipped: {_list_some(skipped)}",) if skipped else ()


def _list_some(texts: Sequence[str]) -> str:
    more = [f"and {len(texts) - _MOST_NAMED:,} more"] if len(texts) > _MOST_NAMED else []
    return "; ".join([*texts[:_MOST_NAMED], *more])


def _fingerprint(folder: Path, listing: Listing) -> str:
    digest = hashlib.sha256(f"{CACHE_VERSION}\n{listing.notes}\n{sorted(listing.labels.items())}\n".encode())
    for name in listing.pictures:
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


def _build(home: Path, folder: Path, listing: Listing, wanted: DataConfig, look: Look | None, fingerprint: str) -> None:
    if not listing.pictures:
        extra = f" ({'; '.join(listing.notes)})" if listing.notes else ""
        raise DataError(f"{folder} has 0 images; at least 3 are needed, one for each split{extra}")
    tile = wanted.tile if look is None else look.tile
    survey, items, skipped, notes = _survey(folder, listing, tile)
    if not items:
        broken = count_words(len(skipped), "broken file")
        reason = f"{broken}; {skipped[0]}" if skipped else f"{notes[0]}; change --tile"
        raise DataError(f"{folder} has no readable image, and {reason}")
    different = len({item.digest for item in items}) + len(skipped)
    if different < len(SPLITS):
        advice = "; if the picture is a sheet of several, cut it with --tile SIDE" if tile is None else ""
        hint = f"at least 3 are needed, one for each split{advice}"
        raise DataError(f"{folder} has {count_words(different, 'different image')}; {hint}")
    readable = {item.name for item in items}
    parts = split_items(items, [name for name in listing.pictures if name not in readable])
    class_of = listing.labels or find_classes([item.name for item in items])
    names = sorted(set(class_of.values()))
    if "" in names[:-2]:
        loose = next(name for name in class_of if not class_of[name])
        notes.append(f"no classes, because {loose} is in none of the {len(names) - 1} folders")
    names = names if len(names) > 1 and "" not in names else []
    if look is None:
        chosen = (item.name for item in sample_evenly(items))
        look, explained = survey.choose(wanted, _read_first(folder, list(dict.fromkeys(chosen)), tile))
        notes = [*describe_sizes(survey.sizes, look), *explained, *notes]
    else:
        notes = [*describe_sizes(survey.sizes, look), *notes]
    classes = {split: [class_of[item.name] for item in part] for split, part in parts.items()}
    if names:
        notes += compare_classes(classes)
    shape = look.shape
    sizes = [len(items), shape.height, shape.width, shape.channels]
    index = {
        "fingerprint": fingerprint,
        "shape": sizes,
        "classes": classes,
        "class_names": names,
        "look": _LOOK.dump_python(look, mode="json"),
        "notes": [*notes, *listing.notes],
        "skipped": skipped,
    }
    try:
        home.parent.mkdir(parents=True, exist_ok=True)
        writing = Path(tempfile.mkdtemp(prefix=f".{home.name}.", dir=home.parent))
    except OSError as error:
        raise DataError(f"cannot write the cache {home.parent} ({error.strerror or error})") from None
    try:
        places = {item: place for place, item in enumerate(item for part in parts.values() for item in part)}
        # The file is not memory-mapped here, because writing to a mapped file on a full disk kills the process.
        with open(writing / _IMAGES, "wb") as file:
            for name in dict.fromkeys(item.name for item in items):
                with contextlib.suppress(DataError):  # as in the survey, a file may be broken after its first images
                    for item, pixels in _read_items(folder, name, tile):
                        if (place := places.pop(item, None)) is not None:
                            file.seek(place * math.prod(sizes[1:]))
                            file.write(look.read(pixels).tobytes())
            if places:
                raise DataError(f"{folder / next(iter(places)).name} has changed since it was first read; try again")
            file.flush()
            os.fsync(file.fileno())
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


def _survey(folder: Path, listing: Listing, tile: int | None) -> tuple[Survey, list[Item], list[str], list[str]]:
    """Look at all images: the survey, the images that can be read, messages about the others, and lines to show."""
    items: list[Item] = []
    survey, skipped, unused = Survey(), [], 0
    sides: dict[str, int] = {}
    for name in listing.pictures:
        before = len(items)
        try:
            for item, pixels in _read_items(folder, name, tile):
                if pixels is None:
                    unused += 1
                else:
                    items.append(dataclasses.replace(item, digest=survey.add(pixels).hex()))
                    sides[name] = max(pixels.shape[:2])
        except DataError as error:
            used = count_words(len(items) - before, "image")
            skipped.append(f"{error}, after {used}, used anyway" if len(items) > before else str(error))
    notes = []
    files = len({item.name for item in items})
    if len(items) > files:
        what = f"tiles of {tile} x {tile}" if tile is not None else "frames"
        notes.append(f"{len(items):,} {what} in {count_words(files, 'file')}, each an image of its own")
    usual = median_low(sides.values()) if sides else 0
    if large := [name for name, side in sides.items() if side > _FAR * usual]:
        notes.append(f"far larger than the others, and one image each (--tile cuts sheets): {_list_some(large)}")
    if unused:
        what = "of another size, or a preview" if tile is None else "of one colour, or cut off by an edge"
        notes.append(f"not used: {count_words(unused, 'frame' if tile is None else 'tile')} {what}")
    copies = Counter(item.digest for item in items)
    if extra := sum(count - 1 for count in copies.values()):
        notes.append(f"{count_words(extra, 'image')} equal to another one; equal images are in the same split")
    return survey, items, skipped, notes


def _read_items(folder: Path, name: str, tile: int | None) -> Iterator[tuple[Item, Any]]:
    """Return the images in a file with their pixels, or with None where a frame or a tile is not used."""
    for number, pixels in enumerate(read_frames(folder / name)):
        if tile is None or pixels is None:
            yield Item(name, number), pixels
            continue
        rows, columns = range(0, pixels.shape[0], tile), range(0, pixels.shape[1], tile)
        for place, (top, left) in enumerate((top, left) for top in rows for left in columns):
            part = pixels[top : top + tile, left : left + tile]
            shown = part if part.shape[2] < 4 or part[..., 3].any() else part[..., 3:]
            is_used = part.shape[:2] == (tile, tile) and (shown != shown[:1, :1]).any()
            yield Item(name, number, place), part if is_used else None


def _read_first(folder: Path, names: Sequence[str], tile: int | None) -> Iterator[Pixels]:
    for name in names:
        with contextlib.suppress(DataError):
            yield from (pixels for _, pixels in _read_items(folder, name, tile) if pixels is not None)


def _remove_leftovers(home: Path, key: str) -> None:
    """Remove caches of earlier states of the folder with this `key`, and partial ones that are a day old."""
    for folder in home.parent.glob(f"{key}*"):
        if folder != home:
            shutil.rmtree(folder, ignore_errors=True)
    for folder in home.parent.glob(f".{key}*"):
        with contextlib.suppress(OSError):
            if time.time() - max(path.stat().st_mtime for path in (folder, *folder.iterdir())) > _LEFTOVER_SECONDS:
                shutil.rmtree(folder, ignore_errors=True)
