"""Parts of a picture: which of its pixels are kept, and which are drawn."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from linformer_cli.config import DEFAULT_PART, LARGEST_SIZE, ImageShape
from linformer_cli.errors import UsageError
from linformer_cli.units import parse_count

_WANTED = (
    "takes top:0.5 (a fraction), top:50%, top:14rows or top:392px, the same with left, right and bottom, or "
    "box:ROW,COLUMN,HEIGHT,WIDTH"
)


@dataclass(frozen=True)
class Part:
    """What is kept of every picture: `pixels` bool [H, W] of its image that are also white in the `mask` uint8 [h, w].

    If the part `yields`, a picture with transparent pixels keeps its opaque ones instead.
    """

    pixels: NDArray[np.bool_]
    mask: NDArray[np.uint8] | None = None
    yields: bool = False


def choose_part(keep: str | None, erase: str | None, mask: NDArray[np.uint8] | None, shape: ImageShape) -> Part:
    """Choose what `--keep` (None: all), `--erase` and `--mask` keep together; `DEFAULT_PART` without the three.

    Raises `UsageError` for values that name no part, and if nothing is left to complete.
    """
    default = keep is None and erase is None and mask is None
    keep = DEFAULT_PART if default else keep
    kept = np.ones((shape.height, shape.width), bool) if keep is None else parse_part("--keep", keep, shape)
    if erase is not None:
        kept &= ~parse_part("--erase", erase, shape)
    if mask is None and kept.all():
        asked = f"--keep {keep}" if erase is None else f"--erase {erase}"
        raise UsageError(f"{asked} keeps the whole image of {shape.height} rows: nothing is left to complete")
    return Part(kept, mask, default)


def parse_part(option: str, text: str, shape: ImageShape) -> NDArray[np.bool_]:
    """Return the pixels bool [H, W] of a part. It is at one side, or a box in pixels of the model's images.

    Sides are `top:0.5` (fraction), `top:14rows`, `top:392px` or `top:50%`. An integer without a unit means rows, or
    columns of the left and right. `px` counts pixels row by row, for top and bottom. Raises `UsageError` for others.
    """
    side, _, amount = text.strip().lower().partition(":")
    part = np.zeros((shape.height, shape.width), bool)
    wrong = UsageError(f"{option} {_WANTED}, found '{text}'")
    if side == "box":
        numbers = [parse_count(number.strip(), LARGEST_SIZE) for number in amount.split(",")]
        if len(numbers) != 4 or None in numbers:
            raise wrong
        row, column, height, width = (number or 0 for number in numbers)
        if not (height and width and row + height <= shape.height and column + width <= shape.width):
            raise UsageError(f"{option} {text} is not a box within {shape.height} rows and {shape.width} columns")
        part[row : row + height, column : column + width] = True
        return part
    if side not in ("top", "bottom", "left", "right"):
        raise wrong
    across = side in ("left", "right")
    lines, others = (shape.width, shape.height) if across else (shape.height, shape.width)
    names = ("columns", "column") if across else ("rows", "row")
    units = [*((name, others) for name in names), *(() if across else (("px", 1),)), ("%", None)]
    unit, scale = next(((unit, scale) for unit, scale in units if amount.endswith(unit)), ("", None))
    try:
        number = float(amount.removesuffix(unit))
    except ValueError:
        number = math.nan
    counted = scale is not None or ("." not in amount and not unit)
    fraction = number / 100 if unit == "%" else number
    if not 0 <= number < math.inf or (number != int(number) if counted else fraction > 1):
        raise wrong
    if counted:
        count = int(number) * (scale or others)
    else:  # whole columns of a side, but single pixels of the top
        count = round(fraction * lines) * others if across else round(fraction * lines * others)
    flat = np.arange(part.size) < min(count, part.size)
    if side in ("bottom", "right"):
        flat = np.flip(flat).copy()
    return flat.reshape(shape.width, shape.height).T if across else flat.reshape(part.shape)
