"""A data set that needs no download: letters and digits in the font that comes with Pillow.

The character, size, position, tilt and brightness of image i depend only on the split and i, so the same image exists
at any resolution. Pixels may differ in the last bits between versions of Pillow and FreeType.
"""

import math
import string
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from linformer_cli.errors import UsageError

CHARACTERS = string.digits + string.ascii_uppercase + string.ascii_lowercase
DEFAULT_SIZE = 28
SMALLEST_SIZE, LARGEST_SIZE = 8, 512
COUNTS = {"train": 8_000, "test": 1_000}

_SEEDS = {"train": 20_200_610, "test": 20_200_611}
_PARAMETERS = 6
_OVERSAMPLING = 2  # images are drawn at twice the size and averaged down, so that tilted strokes are smooth
# Font heights as fractions of the image. At the largest height, the widest character still fits at any tilt.
_FONT_SIZES = (0.65, 0.90)
_LARGEST_TILT_DEGREES, _LARGEST_SHIFT = 10.0, 0.15
_BRIGHTNESS = (144, 255)


def draw_glyphs(
    split: Literal["train", "test"], size: int, start: int = 0, stop: int | None = None
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return images start .. stop - 1 of a split, uint8 [N, size, size, 1], light on black, and labels int64 [N].

    A label is the character's index in `CHARACTERS`. Raises `UsageError` if `size` is not from 8 to 512 pixels.
    """
    if not SMALLEST_SIZE <= size <= LARGEST_SIZE:
        raise UsageError(f"glyphs are {SMALLEST_SIZE} to {LARGEST_SIZE} pixels wide, found {size}")
    stop = COUNTS[split] if stop is None else stop
    # Row i is for image i, whatever `stop` is. numpy guarantees the raw stream of a bit generator across versions.
    words = np.random.Philox(key=_SEEDS[split]).random_raw(stop * _PARAMETERS).reshape(stop, _PARAMETERS)
    uniform: NDArray[np.float64] = (words[start:] >> np.uint64(11)).astype(np.float64) * 2.0**-53
    labels = (uniform[:, 0] * len(CHARACTERS)).astype(np.int64)
    return _draw(labels, uniform[:, 1:], size), labels


def _draw(labels: NDArray[np.int64], uniform: NDArray[np.float64], size: int) -> NDArray[np.uint8]:
    side = size * _OVERSAMPLING
    smallest, largest = (round(side * fraction) for fraction in _FONT_SIZES)
    fonts = {height: ImageFont.load_default(size=height) for height in range(smallest, largest + 1)}
    boxes: dict[tuple[int, str], tuple[float, float, float, float]] = {}
    images = np.empty((len(labels), size, size, 1), dtype=np.uint8)
    for index, (label, (height_draw, x_draw, y_draw, tilt_draw, brightness_draw)) in enumerate(
        zip(labels.tolist(), uniform.tolist(), strict=True)
    ):
        character = CHARACTERS[label]
        height = smallest + int(height_draw * (largest - smallest + 1))
        font = fonts[height]
        if (height, character) not in boxes:
            boxes[height, character] = font.getbbox(character, anchor="ls")
        left, top, right, bottom = boxes[height, character]
        tilt = (2 * tilt_draw - 1) * _LARGEST_TILT_DEGREES
        center = tuple(
            side / 2 + (2 * draw - 1) * min(_LARGEST_SHIFT * side, max(0.0, side / 2 - half))
            for draw, half in zip((x_draw, y_draw), _half_extents(right - left, bottom - top, tilt), strict=True)
        )
        canvas = Image.new("L", (side, side))
        corner = (center[0] - (left + right) / 2, center[1] - (top + bottom) / 2)
        brightness = _BRIGHTNESS[0] + int(brightness_draw * (_BRIGHTNESS[1] - _BRIGHTNESS[0] + 1))
        ImageDraw.Draw(canvas).text(corner, character, fill=brightness, font=font, anchor="ls")
        tilted = canvas.rotate(tilt, resample=Image.Resampling.BICUBIC, center=(center[0], center[1]))
        images[index, :, :, 0] = np.asarray(tilted.reduce(_OVERSAMPLING))
    return images


def _half_extents(width: float, height: float, tilt_degrees: float) -> tuple[float, float]:
    """Return half the width and half the height of the axis-aligned box around a tilted box."""
    cosine, sine = math.cos(math.radians(tilt_degrees)), abs(math.sin(math.radians(tilt_degrees)))
    return (width * cosine + height * sine) / 2, (width * sine + height * cosine) / 2
