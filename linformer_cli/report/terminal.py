"""Images as characters, and durations, sizes and counts as people say them."""

import math
from itertools import groupby

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from rich.color import Color
from rich.style import Style
from rich.text import Text

from .grids import require_images

UPPER_HALF = "\u2580"
GAP_COLUMNS = 2

# Without colour: each character with the brightness, 0 to 1, that it gives the upper and the lower half of its cell.
_SHADES = (
    (" ", 0.0, 0.0),
    ("\u2591", 0.25, 0.25),
    ("\u2592", 0.5, 0.5),
    ("\u2593", 0.75, 0.75),
    ("\u2588", 1.0, 1.0),
    (UPPER_HALF, 1.0, 0.0),
    ("\u2584", 0.0, 1.0),
)
_GREY_WEIGHTS = np.array([0.299, 0.587, 0.114])  # ITU-R 601, as Pillow


def render_preview(images: NDArray[np.uint8], width: int, height_limit: int = 28, *, colour: bool) -> Text:
    """`images` [N, H, W, C] as text: one character is one pixel wide and two high, so pixels stay square.

    As many images side by side as fit into `width` columns, and as many such lines as fit into `height_limit` rows; an
    image larger than that is scaled down, none is scaled up. Where not all are shown, one more row says so.

    `colour` draws with U+2580 and 24 bit colours, which rich brings down to what the terminal has. Without, block
    characters stand for brightness, as light text on a dark ground. A caller with a console passes
    `colour=console.color_system is not None and not console.no_color`.

    Raises `DataError` where `images` is not such an array.
    """
    require_images(images)
    width, height_limit = max(1, width), max(1, height_limit)
    images = _shrink_to_fit(images, width, 2 * height_limit)
    count, image_rows, image_columns = images.shape[0], math.ceil(images.shape[1] / 2), images.shape[2]
    per_line = (width + GAP_COLUMNS) // (image_columns + GAP_COLUMNS)
    lines = min(math.ceil(count / per_line), height_limit // image_rows)
    gap_rows = 1 if lines * (image_rows + 1) - 1 <= height_limit else 0  # rather one more line of images than gaps
    text = Text(no_wrap=True, overflow="crop")
    for line in range(lines):
        if line:
            text.append("\n" * (1 + gap_rows))
        draw = _append_colours if colour else _append_shades
        draw(text, images[line * per_line : (line + 1) * per_line])
    if (shown := min(count, lines * per_line)) < count:
        text.append(f"\n{shown} of {count} images"[: width + 1], style="dim")
    return text


def format_bits(bits: float, error: float | None, digits: int = 4) -> str:
    """bits/dim with their standard error, '0.6929 +- 0.0030', or without where one image gives none."""
    return f"{bits:.{digits}f}" if error is None else f"{bits:.{digits}f} +- {error:.{digits}f}"


def format_duration(seconds: float) -> str:
    """A time as '12.3 ms', '0.4 s', '45 s', '12 min 3 s', '1 h 4 min' or '2 d 3 h'; 'unknown' for NaN and infinity."""
    if not math.isfinite(seconds):
        return "unknown"
    if seconds <= 0:  # a clock that was set back
        return "0 s"
    if seconds < 0.1:
        return f"{_three_digits(seconds * 1000)} ms"
    if seconds < 10:
        return f"{_short(seconds, 1)} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    minutes = round(seconds / 60)
    if minutes < 24 * 60:
        return f"{minutes // 60} h {minutes % 60} min"
    hours = round(seconds / 3600)
    return f"{hours // 24} d {hours % 24} h"


def format_milliseconds(seconds: float) -> str:
    """A time that was measured, as milliseconds of three digits: '0.12 ms', '45.3 ms', '1,205 ms'."""
    return f"{seconds * 1000:,.0f} ms" if seconds >= 1 else f"{_three_digits(seconds * 1000)} ms"


def format_microseconds(seconds: float) -> str:
    """A time that was measured, as microseconds of three digits: '0.12 µs', '45.3 µs', '1,205 µs'."""
    return f"{seconds * 1e6:,.0f} µs" if seconds >= 1e-3 else f"{_three_digits(seconds * 1e6)} µs"


def format_bytes(count: float) -> str:
    """A size with the prefixes of 1024 and three digits: '512 B', '264 KiB', '1.5 MiB'."""
    return _with_prefix(count, 1024, ("B", "KiB", "MiB", "GiB", "TiB", "PiB"))


def format_count(count: float) -> str:
    """A number with the prefixes of 1000 and three digits: '784', '12.3 k', '6.36 M', '1.2 G'."""
    return _with_prefix(count, 1000, ("", "k", "M", "G", "T", "P"))


def _with_prefix(count: float, base: int, units: tuple[str, ...]) -> str:
    value, unit = float(count), 0
    # Compare what will be shown: 999,999 is '1 M', not '1000 k'.
    while unit + 1 < len(units) and float(_three_digits(abs(value))) >= base:
        value, unit = value / base, unit + 1
    return f"{_three_digits(value)} {units[unit]}".rstrip()


def _three_digits(value: float) -> str:
    magnitude = abs(value)
    return _short(value, 2 if magnitude < 10 else 1 if magnitude < 100 else 0)


def _short(value: float, decimals: int) -> str:
    text = f"{value:.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _shrink_to_fit(images: NDArray[np.uint8], width: int, height: int) -> NDArray[np.uint8]:
    """`images` with their proportions kept, at most `width` x `height` pixels."""
    ratio = min(width / images.shape[2], height / images.shape[1])
    if ratio >= 1:
        return images
    size = max(1, int(images.shape[2] * ratio)), max(1, int(images.shape[1] * ratio))
    pictures = (Image.fromarray(image[:, :, 0] if image.shape[2] == 1 else image) for image in images)
    # A box takes the mean of the pixels that fall together and adds no ringing to hard edges.
    small = [np.asarray(picture.resize(size, Image.Resampling.BOX)) for picture in pictures]
    return np.stack(small).reshape(len(small), size[1], size[0], images.shape[3])


def _append_colours(text: Text, images: NDArray[np.uint8]) -> None:
    """One line of images side by side. Equal neighbours share a style, which keeps the escape codes few."""
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
                style = Style(
                    color=Color.from_rgb(*foreground),
                    bgcolor=None if background is None else Color.from_rgb(*background),
                )
                text.append(UPPER_HALF * len(list(pixels)), style)


def _append_shades(text: Text, images: NDArray[np.uint8]) -> None:
    """One line of images side by side, each cell the character whose halves come nearest in brightness."""
    grey = images / 255.0
    grey = grey[:, :, :, 0] if grey.shape[3] == 1 else grey @ _GREY_WEIGHTS
    grey = np.pad(grey, ((0, 0), (0, grey.shape[1] % 2), (0, 0)))
    cells = np.stack((grey[:, 0::2], grey[:, 1::2]), axis=-1)  # [N, rows, columns, 2]
    brightness = np.array([shade[1:] for shade in _SHADES])
    nearest = np.square(cells[..., None, :] - brightness).sum(axis=-1).argmin(axis=-1)
    characters = np.array([shade[0] for shade in _SHADES])[nearest]
    rows = ((" " * GAP_COLUMNS).join("".join(image[row]) for image in characters) for row in range(cells.shape[1]))
    text.append("\n".join(rows))
