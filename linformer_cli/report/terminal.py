"""Images and bytes as text for a terminal."""

import codecs
import itertools
import math
from collections.abc import Sequence
from itertools import groupby

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from rich.color import Color
from rich.style import Style
from rich.text import Text

from linformer_cli.metrics import RunSeries
from linformer_cli.units import IMAGES, Words, format_duration
from .grids import flatten, require_images, to_picture

UPPER_HALF = "\u2580"
GAP_COLUMNS = 2
# Of `render_curves`: the colours of runs, the columns left of the curves, and the lowest value on the scale.
_CURVE_STYLES = ("cyan", "magenta", "green", "yellow", "blue", "red")
_LABEL_COLUMNS = 7
_LEAST_BITS = 1e-3

# Characters for previews without colour, each with the brightness, 0 to 1, of the upper and the lower half of its cell.
_SHADES = (
    (" ", 0.0, 0.0),
    ("\u2591", 0.25, 0.25),
    ("\u2592", 0.5, 0.5),
    ("\u2593", 0.75, 0.75),
    ("\u2588", 1.0, 1.0),
    (UPPER_HALF, 1.0, 0.0),
    ("\u2584", 0.0, 1.0),
)
_GREY_WEIGHTS = np.array([0.299, 0.587, 0.114])  # ITU-R 601, as in Pillow


def render_preview(images: NDArray[np.uint8], width: int, height_limit: int = 28, *, colour: bool) -> Text:
    """Render `images` uint8 [N, H, W, C] as text. A character is one pixel wide and two pixels high.

    Images are placed side by side in lines of `width` columns, in at most `height_limit` rows; larger ones are scaled
    down, and a row says if some are not shown. With `colour`, pixels are U+2580 in 24-bit colours, which rich reduces
    to those of the terminal; otherwise, block characters represent brightness, as light text on a dark background. A
    caller with a console passes `colour=console.color_system is not None and not console.no_color`.
    """
    require_images(images)
    images = flatten(images)
    width, height_limit = max(1, width), max(1, height_limit)
    images = _shrink_to_fit(images, width, 2 * height_limit)
    count, image_rows, image_columns = images.shape[0], math.ceil(images.shape[1] / 2), images.shape[2]
    per_line = (width + GAP_COLUMNS) // (image_columns + GAP_COLUMNS)
    lines = min(math.ceil(count / per_line), height_limit // image_rows)
    # An additional line of images is more useful than gaps.
    gap_rows = 1 if lines * (image_rows + 1) - 1 <= height_limit else 0
    text = Text(no_wrap=True, overflow="crop")
    for line in range(lines):
        if line:
            text.append("\n" * (1 + gap_rows))
        draw = _append_colours if colour else _append_shades
        draw(text, images[line * per_line : (line + 1) * per_line])
    if (shown := min(count, lines * per_line)) < count:
        text.append(f"\n{shown} of {count} images"[: width + 1], style="dim")
    return text


def render_curves(series: Sequence[RunSeries], width: int, height: int, words: Words = IMAGES) -> Text:
    """Draw bits/dim (log scale) against images seen: small dots are training, large ones validation."""
    text, curves = Text(no_wrap=True, overflow="crop"), []
    for style, run in zip(itertools.cycle(_CURVE_STYLES), series, strict=False):
        parts = ("training", "·", run.training), ("validation", "●", run.validation)
        curves += [(mark, style, point) for _, mark, points in parts for point in points]
        newest = max((points[-1] for *_, points in parts if points), key=lambda point: point.step)
        figures = ", ".join(f"{name} {points[-1].bits_per_dim:.4f}" for name, _, points in parts if points)
        time = format_duration(newest.elapsed_seconds)
        text.append(f"{run.label}: step {newest.step:,}, {time}, {figures} {words.bits}\n", style)
    bits = [max(point.bits_per_dim, _LEAST_BITS) for *_, point in curves]
    last, high = max(point.images for *_, point in curves) or 1, max(bits)
    ratio, columns = math.log(high / min(bits)) or 1.0, width - _LABEL_COLUMNS
    cells: dict[tuple[int, int], tuple[str, str]] = {}
    for (mark, style, point), value in zip(curves, bits, strict=True):
        row = round((height - 1) * math.log(high / value) / ratio)
        cells[row, round((columns - 1) * point.images / last)] = mark, style
    for row in range(height):
        label = f"{high * math.exp(-ratio * row / (height - 1)):.3f}" if row in (0, height // 2, height - 1) else ""
        text.append(f"{label:>{_LABEL_COLUMNS - 1}} ")
        for column in range(columns):
            text.append(*cells.get((row, column), (" ", "")))
        text.append("\n")
    return text.append(f"{f'{last:,} {words.items}':>{width}}", "dim")


def _shrink_to_fit(images: NDArray[np.uint8], width: int, height: int) -> NDArray[np.uint8]:
    """Scale `images` down to at most `width` x `height` pixels. The aspect ratio does not change."""
    ratio = min(width / images.shape[2], height / images.shape[1])
    if ratio >= 1:
        return images
    size = max(1, int(images.shape[2] * ratio)), max(1, int(images.shape[1] * ratio))
    # A box filter averages pixels and adds no ringing at hard edges.
    small = [np.asarray(to_picture(image).resize(size, Image.Resampling.BOX)) for image in images]
    return np.stack(small).reshape(len(small), size[1], size[0], images.shape[3])


def _append_colours(text: Text, images: NDArray[np.uint8]) -> None:
    """Append one line of images side by side. Equal neighbours share a style, which saves escape codes."""
    height = images.shape[1]
    colours = np.broadcast_to(images, (*images.shape[:3], 3))
    for top in range(0, height, 2):
        if top:
            text.append("\n")
        for index, image in enumerate(colours):
            if index:
                text.append(" " * GAP_COLUMNS)
            upper = map(tuple, image[top].tolist())
            lower = map(tuple, image[top + 1].tolist()) if top + 1 < height else [None] * image.shape[1]
            for (foreground, background), pixels in groupby(zip(upper, lower, strict=True)):
                ground = None if background is None else Color.from_rgb(*background)
                style = Style(color=Color.from_rgb(*foreground), bgcolor=ground)
                text.append(UPPER_HALF * len(list(pixels)), style)


def _append_shades(text: Text, images: NDArray[np.uint8]) -> None:
    """Append one line of images side by side. Each cell becomes the character nearest in brightness."""
    grey = images / 255.0
    grey = grey[:, :, :, 0] if grey.shape[3] == 1 else grey @ _GREY_WEIGHTS
    grey = np.pad(grey, ((0, 0), (0, grey.shape[1] % 2), (0, 0)))
    cells = np.stack((grey[:, 0::2], grey[:, 1::2]), axis=-1)  # [N, rows, columns, 2]
    nearest = np.square(cells[..., None, :] - np.array([shade[1:] for shade in _SHADES])).sum(axis=-1).argmin(axis=-1)
    characters = np.array([shade[0] for shade in _SHADES])[nearest]
    rows = ((" " * GAP_COLUMNS).join("".join(image[row]) for image in characters) for row in range(cells.shape[1]))
    text.append("\n".join(rows))


class SafeText:
    """Turns bytes that arrive in parts into safe text: U+FFFD for invalid UTF-8, escapes for control characters."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def decode(self, data: bytes, last: bool = False) -> str:
        """Return the next bytes' text. An incomplete character is kept for the next call, unless this is the `last`."""
        return "".join(_escape(character) for character in self._decoder.decode(data, last))


def _escape(character: str) -> str:
    shown = character.isprintable() or character in "\n\t"
    return character if shown else character.encode("unicode_escape").decode()


def render_windows(windows: list[bytes]) -> str:
    """Return the text of `windows`, each after a line with its number."""
    return "".join(f"--- {number} ---\n{SafeText().decode(data, last=True)}\n" for number, data in enumerate(windows))
