"""The files of a folder of pictures: their classes, and the split of every image. Nothing here decodes a picture."""

import csv
import dataclasses
import hashlib
import heapq
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from linformer_cli.errors import DataError, shorten
from linformer_cli.units import count_words
from . import SPLITS
from .pictures import HEIC_ENDINGS, list_endings

LABELS = "labels.csv"
_HELD_OUT = 10  # one image in ten is for testing, and one in ten for validation
# Common names of split folders, in lower case.
_SPLIT_FOLDERS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation"), "validation"),
    **dict.fromkeys(("test", "testing"), "test"),
}


@dataclass(frozen=True, order=True)
class Item:
    """An image of a set: the file, the frame in it, the tile of the frame, and a digest that copies share."""

    name: str
    frame: int = 0
    tile: int = 0
    digest: str = dataclasses.field(default="", compare=False)


@dataclass(frozen=True)
class Listing:
    """The files of a folder: pictures, class names by file, messages about what cannot be read, and what is ignored."""

    pictures: list[str]
    labels: dict[str, str]
    unread: list[str]
    notes: list[str]


def list_folder(folder: Path) -> Listing:
    files, unread = _list_files(folder)
    endings = list_endings() | {".npy"}
    pictures = [name for name in files if PurePosixPath(name).suffix.lower() in endings]
    labels, notes = _read_labels(folder, pictures) if LABELS in files else ({}, [])
    others = [name for name in files if PurePosixPath(name).suffix.lower() not in endings and name != LABELS]
    heic = sum(name.lower().endswith(HEIC_ENDINGS) for name in others)
    if heic:
        notes.append(f"{count_words(heic, 'HEIC picture')} left out; pip install pillow-heif, or save as JPEG")
    if len(others) > heic:
        first = next(name for name in others if not name.lower().endswith(HEIC_ENDINGS))
        notes.append(f"{count_words(len(others) - heic, 'file')} ignored (not pictures), such as {first}")
    return Listing(pictures, labels, unread, notes)


def _read_labels(folder: Path, pictures: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Return the class of each picture that `labels.csv` names, and lines about it. The first line may be a heading."""
    try:
        text = (folder / LABELS).read_text(encoding="utf-8-sig")
        rows = [[cell.strip() for cell in row] for row in csv.reader(text.splitlines(), skipinitialspace=True) if row]
    except (OSError, UnicodeError, csv.Error) as error:
        return {}, [f"{LABELS} cannot be read ({error}), so it is ignored"]
    by_name = {PurePosixPath(name).name: name for name in pictures} | {name: name for name in pictures}
    # The names of the files are in the first or in the second column.
    columns = ([row[:2] for row in rows if len(row) > 1], [row[1::-1] for row in rows if len(row) > 1])
    labels = max(({by_name[a]: b for a, b in pairs if a in by_name and b} for pairs in columns), key=len)
    if len(labels) < len(pictures):
        missing = next(name for name in pictures if name not in labels)
        named = f"{len(labels):,} of {len(pictures):,} pictures, and not, for example, {missing}"
        return {}, [f"{LABELS} is ignored: its lines 'file,label' name {named}"]
    return labels, []


def _list_files(folder: Path) -> tuple[list[str], list[str]]:
    """List the relative paths of all files below `folder` except hidden ones, sorted, and what cannot be read."""
    endings = list_endings()
    found, unread = [], []
    # Each folder is read once, and before links to it, so that it is read under its own name.
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
            if place == folder and isinstance(error, FileNotFoundError | NotADirectoryError):
                kind = "is not a folder" if folder.exists() else "does not exist"
                raise DataError(f"{folder} {kind}; pass a folder that holds images, as in folder:PATH") from None
            if place == folder:
                raise DataError(f"cannot read the folder {folder} ({error.strerror or error})") from None
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
                    continue
            if is_folder:
                heapq.heappush(waiting, (entry.is_symlink(), path))
            else:
                found.append(path.relative_to(folder).as_posix())
    return sorted(found), sorted(unread)


def compare_classes(classes: dict[str, list[str]]) -> list[str]:
    counts = Counter(name for part in classes.values() for name in part)
    late = [name for name in sorted(counts) if name not in set(classes["train"])]
    lines = [f"{len(counts)} classes: {shorten(', '.join(f'{name} ({counts[name]:,})' for name in sorted(counts)))}"]
    if late:
        lines.append(f"no training image has the class {' or '.join(late)}, so a model cannot learn it")
    return lines


def split_items(items: Sequence[Item], broken: Sequence[str]) -> dict[str, list[Item]]:
    """Return the items in each split, in order. A split depends only on names, so a broken file changes no split."""
    # Names often sort by class or date, so images are chosen, and those held out are ordered, by digest.
    names = [*broken, *dict.fromkeys(item.name for item in items)]
    own, per_file = _brings_splits(names), Counter(item.name for item in items)
    together = len(per_file) >= _HELD_OUT
    chosen: dict[str, str] = {}
    groups: dict[str, list[Item]] = {name: [] for name in broken}
    for item in sorted(items, key=_order):
        split = own and _split_folder(item.name)
        group = item.name if together and per_file[item.name] > 1 else item.digest
        group = f"{split}/{group}" if split else group
        groups.setdefault(group, []).append(item)
        chosen[group] = split or "train"
    for name in broken:
        chosen[name] = (own and _split_folder(name)) or "train"
    order = sorted(groups, key=lambda group: _order(groups[group][0] if groups[group] else Item(group)))
    free = [group for group in order if chosen[group] == "train"]
    # Copies are for training, so that those who hold out images do not measure one of them many times.
    free.sort(key=lambda group: len(groups[group]) > 1 and not (together and per_file[groups[group][0].name] > 1))
    held_out = max(1, len(free) // _HELD_OUT)
    for split in ("test", "validation"):
        if split not in chosen.values():
            chosen.update(dict.fromkeys(free[:held_out], split))
            free = free[held_out:]
    parts: dict[str, list[Item]] = {
        split: [item for group in order if chosen[group] == split for item in groups[group]] for split in SPLITS
    }
    parts["train"].sort()
    return parts


def _order(item: Item) -> tuple[bytes, int, int]:
    return hashlib.sha256(os.fsencode(item.name)).digest(), item.frame, item.tile


def _split_folder(name: str) -> str | None:
    first, _, rest = name.partition("/")
    return _SPLIT_FOLDERS.get(first.casefold()) if rest else None


def _brings_splits(names: Sequence[str]) -> bool:
    """Return whether there are folders for training and for another split. A folder `train` alone may be a class."""
    found = set(map(_split_folder, names))
    return "train" in found and not found.isdisjoint({"validation", "test"})


def find_classes(names: Sequence[str]) -> dict[str, str]:
    """Return the class folder of each file, or "" if there is none. The folder of a split is not a class."""
    names = list(dict.fromkeys(names))
    own = _brings_splits(names) or all(map(_split_folder, names))
    within = {name: name.partition("/")[2] if own and _split_folder(name) else name for name in names}
    return {name: rest.rpartition("/")[0].partition("/")[0] for name, rest in within.items()}
