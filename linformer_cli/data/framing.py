"""Brings a drawing or a photograph of one into the frame of a data set: position, size, polarity and grey levels.

The digits of MNIST, for example, fill a box of 20 pixels and are centred. A model continues other frames poorly.
"""

import itertools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageChops, ImageDraw, ImageFilter

from linformer_cli.checkpoint_files import Frame
from linformer_cli.config import ImageShape

Floats = NDArray[np.float64]

_INK = 32.0  # a difference from the ground of at least this much, out of 255, is ink
_CLEAN = 0.95  # a data set has a frame if this share of its images has no ink at the border
_LONGEST = 1024  # a photograph is first reduced to this many pixels a side
# A drawing on a plain ground has ink in at most this share of all pixels, and of the pixels at the border.
_MOST_INK, _MOST_BORDER_INK = 0.5, 0.2
_SPECK = 0.003  # at each side of a drawing, this share of its ink may be specks on the paper
# A drawing that spans more than this share of a side may be ruled lines, a shadow, or the edge of a desk. A light one
# that fills this share of a box of that share of the picture may be a sheet on a dark desk.
_SPANS, _FILLED, _SHEET = 0.8, 0.55, 0.25
# Such a picture is searched for lines that are narrower than the share `_PEN` of its longer side, in a copy of `_SMALL`
# pixels, and, if that helps, thicker than the share `_THIN`.
_PEN, _SMALL, _THIN = 0.06, 256, 0.007
# In a sheet, neighbouring pixels of the small copy differ by less than `_EDGE`. A sheet covers this share of the
# picture, and this share of a quadrilateral with corners that are outermost in some of so many directions.
_EDGE, _LEAST_SHEET, _QUADRILATERAL, _DIRECTIONS = 16, 0.12, 0.9, 24
_FOCUS = 0.75  # the focal length of a usual phone, as a share of the longer side of a photograph
# A box of this many times its height may contain several drawings.
_ROW = 1.5
_LARGE = 200  # smaller pictures are no photographs of a sheet
_LEAST_CONTRAST = 24.0  # less contrast than this, out of 255, is noise on an empty sheet


@dataclass(frozen=True)
class _Found:
    """The ink [h, w] in the box around a drawing (0: ground), whether it is darker than the ground, the `sides` of the
    whole picture, and whether the box touches one of them."""

    ink: Floats
    is_dark: bool
    sides: tuple[int, ...]
    is_cut: bool


def measure_frame(images: NDArray[np.uint8]) -> Frame | None:
    """Measure the frame (medians, and the mean centre) of grey images [N, H, W, C]; None if they are no drawings."""
    if images.shape[3] != 1 or min(images.shape[1:3]) < 3:
        return None
    border = _border(images.shape[1:3], 1)
    ground = 255 if np.median(images[:, border]) > 127 else 0
    clean = (abs(images[:, border, 0] - float(ground)) < _INK).mean(axis=1) > 0.9
    found = [_measure_drawing(abs(image[..., 0] - float(ground))) for image in images]
    drawings = [drawing for drawing in found if drawing is not None]
    if clean.mean() < _CLEAN or not drawings:
        return None
    boxes, levels, centres = zip(*drawings, strict=True)
    row, column = np.mean(centres, axis=0)
    return Frame(
        ground=ground,
        ink=round(float(np.median(levels)), 2),
        box=round(float(np.median(boxes)), 2),
        centre=(round(float(row), 2), round(float(column), 2)),
    )


def frame_picture(picture: Image.Image, frame: Frame, shape: ImageShape) -> list[tuple[NDArray[np.uint8], str]]:
    """Bring the drawings in a grey picture of any size into `frame`. Returns uint8 [H, W, 1] and a note for each.

    Drawings in a row are told apart. Ruled lines and the desk around a sheet are left out. None is found in others.
    """
    picture = picture.copy()
    picture.thumbnail((_LONGEST, _LONGEST))
    sheet = _straighten(picture) if max(picture.size) > _LARGE else None
    found, done = None if sheet is None else _find_drawing(sheet, True), "sheet straightened, "
    if found is None or found.is_cut or _is_doubtful(found):  # the edge of a shadow may look like that of a sheet
        found, done = _find_drawing(picture), ""
    if found is None:
        return []
    framed = (_frame_drawing(ink, found.is_dark, frame, shape) for ink in _part_drawings(found.ink))
    return [(image, done + note) for image, note in framed]


def _find_drawing(picture: Image.Image, is_sheet: bool = False) -> _Found | None:
    """Find the ink of a grey picture. Ruled lines are left out of a sheet, and the desk too if the ink is doubtful."""
    pixels = np.asarray(picture, dtype=np.float64)
    found = None if is_sheet else _find_ink(pixels)
    if _is_doubtful(found) and max(pixels.shape) > _LARGE:
        ground = np.asarray(_close_lines(picture).resize(picture.size, Image.Resampling.BILINEAR), dtype=np.float64)
        thin = 2 * round(max(pixels.shape) * _THIN / 2) + 1
        tried = (_find_ink(pixels, *way) for way in ((ground, thin), (ground, 1), (None, thin)))
        found = next((ink for ink in tried if not _is_doubtful(ink)), found)
    return found


def _straighten(picture: Image.Image) -> Image.Image | None:
    """Return the sheet in a photograph from above, or None: the largest smooth region that is whole, if it is bright
    and a quadrilateral."""
    small = _close_lines(picture)
    smooth = ImageChops.difference(small.filter(ImageFilter.MaxFilter(3)), small.filter(ImageFilter.MinFilter(3)))
    regions = smooth.point([255 * (value < _EDGE) for value in range(256)])
    for number in range(1, 255):
        if len(rest := np.argwhere(np.asarray(regions) == 255)):
            ImageDraw.floodfill(regions, (int(rest[0, 1]), int(rest[0, 0])), number)
    numbers = np.asarray(regions)
    counts = np.bincount(numbers.ravel(), minlength=256)
    counts[[0, 255, *numbers[_border(numbers.shape, 1)]]] = 0
    inside, values = numbers == counts.argmax(), np.asarray(small)
    if counts.max() < _LEAST_SHEET * inside.size or values[inside].mean() < values.mean():
        return None
    # The corners are those of the largest quadrilateral among the outermost points in some directions.
    angles = np.arange(_DIRECTIONS) * 2 * math.pi / _DIRECTIONS
    places = np.argwhere(inside)[:, ::-1]
    outer = places[(places @ [np.cos(angles), np.sin(angles)]).argmax(axis=0)]
    four = outer[list(itertools.combinations(range(_DIRECTIONS), 4))].astype(float)
    across, down = four[:, 2] - four[:, 0], four[:, 3] - four[:, 1]
    areas = (across[:, 0] * down[:, 1] - across[:, 1] * down[:, 0]) / 2
    corners = four[areas.argmax()]
    if counts.max() < _QUADRILATERAL * areas.max():
        return None
    turned = [np.roll(corners, turn, axis=0) for turn in range(4)]
    factor, focus = picture.width / small.width, _FOCUS * max(picture.size)
    corners = (max(turned, key=_measure_uprightness) + 0.5) * factor
    # From the sheet, a square of side 1, to directions from the camera: the lengths are those of its sides.
    sides = _map_square(corners - np.array(picture.size) / 2)[:, :2] / [[focus], [focus], [1]]
    across, down = np.linalg.norm(sides, axis=0).tolist()
    area = float(areas.max())
    size = round(factor * math.sqrt(area * across / down)), round(factor * math.sqrt(area * down / across))
    back = _map_square(corners) / [size[0], size[1], 1]
    return picture.transform(size, Image.Transform.PERSPECTIVE, back.ravel()[:8].tolist(), Image.Resampling.BICUBIC)


def _measure_uprightness(corners: Floats) -> float:
    """Return how far the sides of a sheet from its top left corner go to the right and down, at most 2."""
    right, down = corners[1] + corners[2] - corners[0] - corners[3], corners[2] + corners[3] - corners[0] - corners[1]
    return float(right[0] / np.linalg.norm(right) + down[1] / np.linalg.norm(down))


def _map_square(corners: Floats) -> Floats:
    """Return the projective map [3, 3] of the corners (0, 0), (1, 0), (1, 1) and (0, 1) to these."""
    rows = [
        row
        for (x, y), (u, v) in zip(((0, 0), (1, 0), (1, 1), (0, 1)), corners.tolist(), strict=True)
        for row in ([x, y, 1, 0, 0, 0, -x * u, -y * u], [0, 0, 0, x, y, 1, -x * v, -y * v])
    ]
    return np.append(np.linalg.solve(rows, corners.ravel()), 1).reshape(3, 3)


def _part_drawings(ink: Floats) -> list[Floats]:
    """Return the drawings in a row of them, from left to right, or the one drawing in `ink`."""
    height, width = ink.shape
    if width <= _ROW * height:
        return [ink]
    filled = np.pad((ink > 0).any(axis=0), 1).astype(int)
    starts, ends = np.flatnonzero(np.diff(filled) > 0), np.flatnonzero(np.diff(filled) < 0)
    parts = [ink[:, start:end] for start, end in zip(starts, ends, strict=True)]
    parts = [part for part in parts if part.sum() > _SPECK * ink.sum()]
    tall = [part[_span((part > 0).any(axis=1))] for part in parts]
    # Dots, and the parts of one drawing, are lower than the whole row.
    return tall if len(tall) > 1 and min(len(part) for part in tall) > height / 2 else [ink]


def _frame_drawing(ink: Floats, is_dark: bool, frame: Frame, shape: ImageShape) -> tuple[NDArray[np.uint8], str]:
    scale = min(frame.box, shape.height, shape.width) / max(ink.shape)
    height, width = (max(1, round(side * scale)) for side in ink.shape)
    # This filter averages all pixels that a smaller pixel covers.
    resized = Image.fromarray(ink.astype(np.float32)).resize((width, height), Image.Resampling.BILINEAR)
    small = np.asarray(resized, dtype=np.float64)
    level = np.quantile(small[small >= small.max() / 4], 0.9)
    small = (small * frame.ink / level).clip(0, 255)
    framed = _place(small, frame, shape)
    values = abs(frame.ground - framed).round().clip(0, 255).astype(np.uint8)
    polarity = ", inverted" if is_dark != (frame.ground == 255) else ""
    note = f"drawing of {ink.shape[1]} x {ink.shape[0]} pixels scaled to {width} x {height} and centred{polarity}"
    return values[..., None], note


def _measure_drawing(ink: Floats) -> tuple[int, float, tuple[float, float]] | None:
    """Measure the longer side of a drawing's box, its ink's level and its centre of mass; None if there is no ink."""
    inked = ink >= _INK
    if not inked.any():
        return None
    rows, columns = _span(inked.any(axis=1)), _span(inked.any(axis=0))
    longer = max(rows.stop - rows.start, columns.stop - columns.start)
    return longer, float(np.quantile(ink[inked], 0.9)), _centre(ink)


def _centre(ink: Floats) -> tuple[float, float]:
    """Return the centre of mass of ink [H, W], in pixels from the top left corner of the image."""
    sums = ink.sum(axis=1), ink.sum(axis=0)
    row, column = (float(side @ (np.arange(len(side)) + 0.5) / side.sum()) for side in sums)
    return row, column


def _span(present: Any) -> slice:
    where = np.flatnonzero(present)
    return slice(int(where[0]), int(where[-1]) + 1)


def _is_doubtful(found: _Found | None) -> bool:
    """Return whether no drawing was found, or one that nearly spans the picture, or perhaps a sheet on a dark desk."""
    if found is None or any(side > _SPANS * whole for side, whole in zip(found.ink.shape, found.sides, strict=True)):
        return True
    is_large = found.ink.size > _SHEET * math.prod(found.sides)
    return not found.is_dark and is_large and bool((found.ink > 0).mean() > _FILLED)


def _close_lines(picture: Image.Image) -> Image.Image:
    """Return the paper without the drawing: at `_SMALL` pixels, without dark lines narrower than `_PEN` of these."""
    small = picture.copy()
    small.thumbnail((_SMALL, _SMALL))
    turns = round(_SMALL * _PEN / 4)
    margin = 4 * turns  # a strip of desk at the border goes on beyond it, so it is no line
    closed = Image.fromarray(np.pad(np.asarray(small), margin, mode="edge"))
    for kind in (ImageFilter.MaxFilter, ImageFilter.MinFilter):
        for _ in range(turns):
            closed = closed.filter(kind(5))
    return closed.crop((margin, margin, margin + small.width, margin + small.height))


def _find_ink(pixels: Floats, ground: Floats | None = None, thin: int = 1) -> _Found | None:
    """Find what differs from `ground` [H, W] (a plane fitted to the border), `thin` pixels thick, or None."""
    height, width = pixels.shape
    if min(height, width) < 3:
        return None
    border = _border(pixels.shape, max(1, min(height, width) // 20))
    difference = pixels - (_fit_ground(pixels, border) if ground is None else ground)
    # The ink is what differs most from the ground.
    strongest = difference[abs(difference) >= np.quantile(abs(difference), 0.98)]
    is_dark = bool(strongest.mean() < 0)
    ink = (-difference if is_dark else difference).clip(0)
    threshold = _split(ink)
    inked = ink > threshold
    if thin > 1:
        thick = Image.fromarray(inked).convert("L").filter(ImageFilter.MinFilter(thin))
        near = thick.filter(ImageFilter.MaxFilter(2 * thin + 1))
        ink = np.where(np.asarray(near) > 0, ink, 0)
        inked = ink > threshold
    if ink.max() < _LEAST_CONTRAST or not inked.any():
        return None
    if inked.mean() > _MOST_INK or inked[border].mean() > _MOST_BORDER_INK:
        return None
    # Half of the threshold still belongs to the soft edge of a line. Less is paper.
    soft = np.where(ink > threshold / 2, ink - threshold / 2, 0)
    box = _span_without_specks(soft.sum(axis=1)), _span_without_specks(soft.sum(axis=0))
    is_cut = any(part.start == 0 or part.stop == side for part, side in zip(box, pixels.shape, strict=True))
    return _Found(soft[box], is_dark, pixels.shape, is_cut)


def _border(shape: tuple[int, ...], width: int) -> NDArray[np.bool_]:
    border = np.ones(shape, dtype=bool)
    border[width:-width, width:-width] = False
    return border


def _fit_ground(pixels: Floats, border: NDArray[np.bool_]) -> Floats:
    """Return the plane a + b * row + c * column that fits the `border` of a picture best, without its outliers."""
    height, width = pixels.shape
    row, column = np.mgrid[0:height, 0:width]
    terms = np.stack([np.ones(height * width), row.ravel() / height, column.ravel() / width], axis=1)
    inside, values = terms[border.ravel()], pixels[border]
    usual = abs(values - np.median(values)) <= max(8.0, 2 * float(np.median(abs(values - np.median(values)))))
    return (terms @ np.linalg.lstsq(inside[usual], values[usual], rcond=None)[0]).reshape(pixels.shape)


def _split(ink: Floats) -> float:
    """Return the threshold that divides values into two groups with the least variance within them (Otsu 1979)."""
    counts, edges = np.histogram(ink, bins=256)
    middles = (edges[:-1] + edges[1:]) / 2
    below = np.cumsum(counts)[:-1]
    above = counts.sum() - below
    total = np.cumsum(counts * middles)
    means = total[:-1] / np.maximum(below, 1), (total[-1] - total[:-1]) / np.maximum(above, 1)
    return float(edges[1 + np.argmax(below * above * (means[1] - means[0]) ** 2)])


def _span_without_specks(ink: Floats) -> slice:
    """Return the slice of ink [n] without its two ends, each with at most the fraction `_SPECK` of the ink."""
    share = np.cumsum(ink) / ink.sum()
    return slice(int(np.searchsorted(share, _SPECK)), int(np.searchsorted(share, 1 - _SPECK)) + 1)


def _place(ink: Floats, frame: Frame, shape: ImageShape) -> Floats:
    """Return ink [height, width] whose centre of mass is as near to the frame's as the image allows."""
    placed = np.zeros((shape.height, shape.width))
    top, left = (
        min(max(0, round(wanted - found)), room - side)
        for wanted, found, room, side in zip(frame.centre, _centre(ink), placed.shape, ink.shape, strict=True)
    )
    placed[top : top + ink.shape[0], left : left + ink.shape[1]] = ink
    return placed
