"""Brings a drawing or a photograph of one into the frame of a data set: position, size, polarity and grey levels.

The digits of MNIST, for example, are scaled to a box of 20 pixels, and their centre of mass is in the middle of the
image. A model trained on such images draws poorly if it has to continue a drawing with another frame.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFilter

from linformer_cli.checkpoint_files import Frame
from linformer_cli.config import ImageShape

Floats = NDArray[np.float64]

# A difference from the ground of at least this much, out of 255, is ink.
_INK = 32.0
# A data set has a frame if this share of its images has no ink at the border.
_CLEAN = 0.95
# A photograph is first reduced to this many pixels a side.
_LONGEST = 1024
# A drawing on a plain ground has ink in at most this share of all pixels, and of the pixels at the border.
_MOST_INK, _MOST_BORDER_INK = 0.5, 0.2
# At each side of a drawing, this share of its ink may be specks on the paper.
_SPECK = 0.003
# A drawing that spans more than this share of a side may be ruled lines, a shadow, or the edge of a desk. A light one
# that fills this share of a box of that share of the picture may be a sheet on a dark desk.
_SPANS, _FILLED, _SHEET = 0.8, 0.55, 0.25
# Such a picture is searched for lines that are narrower than the share `_PEN` of its longer side, in a copy of `_SMALL`
# pixels, and, if that helps, thicker than the share `_THIN`.
_PEN, _SMALL, _THIN = 0.06, 256, 0.007
# A box of this many times its height may contain several drawings.
_ROW = 1.5
_LARGE = 200  # smaller pictures are no photographs of a sheet
# Less contrast than this, out of 255, is noise on an empty sheet.
_LEAST_CONTRAST = 24.0


@dataclass(frozen=True)
class _Found:
    """The ink [h, w] in the box around a drawing (0: ground), whether it is darker than the ground, and the `sides` of
    the whole picture."""

    ink: Floats
    is_dark: bool
    sides: tuple[int, ...]


def measure_frame(images: NDArray[np.uint8]) -> Frame | None:
    """The frame of grey images [N, H, W, C]; None if they are in colour, or are not drawings on a plain ground.

    Box and grey level are medians over the images, and the centre is a mean.
    """
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

    Drawings are told apart if they stand in a row with gaps between them. Ruled lines and the desk around a sheet are
    left out. The list is empty if the picture does not show a drawing on a plain ground.
    """
    picture = picture.copy()
    picture.thumbnail((_LONGEST, _LONGEST))
    pixels = np.asarray(picture, dtype=np.float64)
    found = _find_ink(pixels)
    if _is_doubtful(found) and max(pixels.shape) > _LARGE:
        thin, ground = 2 * round(max(pixels.shape) * _THIN / 2) + 1, _close_lines(picture)
        tried = (_find_ink(pixels, *way) for way in ((ground, thin), (ground, 1), (None, thin)))
        found = next((ink for ink in tried if not _is_doubtful(ink)), found)
    if found is None:
        return []
    return [_frame_drawing(ink, found.is_dark, frame, shape) for ink in _part_drawings(found.ink)]


def _part_drawings(ink: Floats) -> list[Floats]:
    """The drawings in a row of them, from left to right, or the one drawing in `ink`."""
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
    """The longer side of a drawing's box, the level of its ink, and its centre of mass; None if there is no ink."""
    inked = ink >= _INK
    if not inked.any():
        return None
    rows, columns = _span(inked.any(axis=1)), _span(inked.any(axis=0))
    longer = max(rows.stop - rows.start, columns.stop - columns.start)
    return longer, float(np.quantile(ink[inked], 0.9)), _centre(ink)


def _centre(ink: Floats) -> tuple[float, float]:
    """The centre of mass of ink [H, W], in pixels from the top left corner of the image."""
    sums = ink.sum(axis=1), ink.sum(axis=0)
    row, column = (float(side @ (np.arange(len(side)) + 0.5) / side.sum()) for side in sums)
    return row, column


def _span(present: Any) -> slice:
    """The slice from the first to the last True of bool [n]."""
    where = np.flatnonzero(present)
    return slice(int(where[0]), int(where[-1]) + 1)


def _is_doubtful(found: _Found | None) -> bool:
    """Whether no drawing was found, or one that nearly spans the picture, or what may be a sheet on a dark desk."""
    if found is None or any(side > _SPANS * whole for side, whole in zip(found.ink.shape, found.sides, strict=True)):
        return True
    is_large = found.ink.size > _SHEET * math.prod(found.sides)
    return not found.is_dark and is_large and bool((found.ink > 0).mean() > _FILLED)


def _close_lines(picture: Image.Image) -> Floats:
    """The picture [H, W] without what is darker than its surroundings and narrower than `_PEN` of its longer side.

    What is left is the paper in its own light, and the desk around it.
    """
    small = picture.copy()
    small.thumbnail((_SMALL, _SMALL))
    turns = round(_SMALL * _PEN / 4)
    margin = 4 * turns  # a strip of desk at the border goes on beyond it, so it is no line
    closed = Image.fromarray(np.pad(np.asarray(small), margin, mode="edge"))
    for kind in (ImageFilter.MaxFilter, ImageFilter.MinFilter):
        for _ in range(turns):
            closed = closed.filter(kind(5))
    closed = closed.crop((margin, margin, margin + small.width, margin + small.height))
    return np.asarray(closed.resize(picture.size, Image.Resampling.BILINEAR), dtype=np.float64)


def _find_ink(pixels: Floats, ground: Floats | None = None, thin: int = 1) -> _Found | None:
    """Return what differs from the `ground` [H, W], if it is at least `thin` pixels thick; None if that is no drawing.

    Without a ground, it is a plane fitted to the border, because the light on a photographed sheet is rarely even.
    """
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
    return _Found(soft[box], is_dark, pixels.shape)


def _border(shape: tuple[int, ...], width: int) -> NDArray[np.bool_]:
    """Where the outermost `width` pixels of an image are."""
    border = np.ones(shape, dtype=bool)
    border[width:-width, width:-width] = False
    return border


def _fit_ground(pixels: Floats, border: NDArray[np.bool_]) -> Floats:
    """The plane a + b * row + c * column that fits the `border` of a picture best, without its outliers."""
    height, width = pixels.shape
    row, column = np.mgrid[0:height, 0:width]
    terms = np.stack([np.ones(height * width), row.ravel() / height, column.ravel() / width], axis=1)
    inside, values = terms[border.ravel()], pixels[border]
    usual = abs(values - np.median(values)) <= max(8.0, 2 * float(np.median(abs(values - np.median(values)))))
    factors = np.linalg.lstsq(inside[usual], values[usual], rcond=None)[0]
    return (terms @ factors).reshape(pixels.shape)


def _split(ink: Floats) -> float:
    """The threshold that divides values into two groups with the least variance within them (Otsu 1979)."""
    counts, edges = np.histogram(ink, bins=256)
    middles = (edges[:-1] + edges[1:]) / 2
    below = np.cumsum(counts)[:-1]
    above = counts.sum() - below
    total = np.cumsum(counts * middles)
    means = total[:-1] / np.maximum(below, 1), (total[-1] - total[:-1]) / np.maximum(above, 1)
    return float(edges[1 + np.argmax(below * above * (means[1] - means[0]) ** 2)])


def _span_without_specks(ink: Floats) -> slice:
    """The slice of ink [n] without its two ends, each with at most the fraction `_SPECK` of the ink."""
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
