"""Writes the items of a compressed file to a folder. What damaged blocks held is lost, and the rest is written."""

import io
import os
import sys
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from linformer_cli.errors import UsageError
from linformer_cli.files import open_atomically, write_file
from linformer_cli.report.grids import to_picture
from .header import Header
from .items import DAMAGED, Pixels, Tiling
from .pack import Part, Restored, iter_parts
from .sources import restore_colours


@dataclass
class Outcome:
    """The number of items written whole, and the names of those lost wholly or in part."""

    written: int = 0
    lost: list[str] = field(default_factory=list)
    partly_lost: list[str] = field(default_factory=list)


def require_free_names(header: Header, folder: Path) -> None:
    if not folder.exists():
        return
    contents = header.contents
    for index in range(contents.count):
        for path in _choose_paths(folder, contents.item(index).name):
            if path.exists():
                raise UsageError(f"'{path}' exists already; choose another folder, or overwrite with --force")


def require_distinct_names(header: Header) -> None:
    """Raise `UsageError` if two items would be one file where the system ignores case or how accents are encoded."""
    if sys.platform not in ("darwin", "win32"):
        return
    seen: dict[str, str] = {}
    for item in header.contents.items:
        other = seen.setdefault(unicodedata.normalize("NFC", item.name).casefold(), item.name)
        if other != item.name:
            raise UsageError(f"'{other}' and '{item.name}' are the same file on this system; decompress on Linux")


def restore_items(header: Header, blocks: Iterator[Restored], folder: Path) -> Outcome:
    """Write all items into `folder`. Raises `LintxError` if the system refuses."""
    tiling, parts, outcome = header.contents.tiling, iter_parts(header, blocks), Outcome()
    for part in parts:
        if tiling.is_bytes:
            lost, count = _restore_file(part, parts, folder)
        else:
            lost, count = _restore_picture(part, parts, folder, tiling)
        if not lost:
            outcome.written += 1
        else:
            (outcome.lost if lost == count else outcome.partly_lost).append(part.item.name)
    return outcome


def _restore_file(part: Part, parts: Iterator[Part], folder: Path) -> tuple[int, int]:
    """Write the file that begins with `part`, window by window. Return how many windows are lost, and of how many."""
    left, lost, count = part.item.width, 0, 0
    whole, damaged = _choose_paths(folder, part.item.name)
    with open_atomically(whole, lambda: damaged.name if lost else None, flush=False) as file:
        while True:
            data = part.tiles.tobytes()[:left]
            file.write(data)
            left -= len(data)
            lost += int(part.lost.sum())
            count += len(part.lost)
            if part.last:
                break
            part = next(parts)
    if lost and lost == count:
        Path(os.path.realpath(whole)).with_name(damaged.name).unlink()
    return lost, count


def _restore_picture(part: Part, parts: Iterator[Part], folder: Path, tiling: Tiling) -> tuple[int, int]:
    """Write the picture that begins with `part`. Return how many tiles are lost, and of how many."""
    found = [part]
    while not found[-1].last:
        found.append(next(parts))
    lost = np.concatenate([each.lost for each in found])
    if not lost.all():
        pixels = tiling.join(part.item, np.concatenate([each.tiles for each in found]))
        whole, damaged = _choose_paths(folder, part.item.name)
        colours: Sequence[Sequence[int]] = ()
        if (shape := tiling.shape).palette:
            pixels = restore_colours(pixels, part.item, shape)
            own = part.item.colours.tolist() if part.item.palette else shape.colours
            colours = own if part.item.bands == 1 else ()
        write_file(damaged if lost.any() else whole, encode_picture(pixels, colours), flush=False)
    return int(lost.sum()), len(lost)


def _choose_paths(folder: Path, name: str) -> tuple[Path, Path]:
    whole = folder.joinpath(*name.split("/"))
    return whole, whole.with_name(DAMAGED.format(whole.name))


def encode_picture(pixels: Pixels, colours: Sequence[Sequence[int]] = ()) -> bytes:
    """Return the PNG of pixels uint8 [H, W, bands], or of the numbers of `colours` [H, W, 1]."""
    buffer = io.BytesIO()
    to_picture(pixels, colours).save(buffer, "PNG")
    return buffer.getvalue()
