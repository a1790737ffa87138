"""Whether samples copy training images: the nearest training image of each."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from linformer_cli.config import ImageShape
from linformer_cli.data.byte_windows import ByteWindows
from linformer_cli.data.images import ImageSet
from linformer_cli.data.sequence import paint
from linformer_cli.report.grids import choose_scale, render_grid, stack_rows
from linformer_cli.system.signals import Check, never_stop
from linformer_cli.units import count_words

Pixels = NDArray[np.uint8]

_ACROSS = 12
# Distances are computed for about this many pairs of images at once, whose images have at most about so many values.
_PAIRS, _VALUES = 2**21, 2**24
_HELD_OUT = 256  # at most this many held-out images are compared


@dataclass(frozen=True)
class Nearest:
    """The nearest of other images to each of N images: its index int64 [N], and its distance float64 [N]."""

    indices: NDArray[np.int64]
    distances: NDArray[np.float64]


@dataclass(frozen=True)
class Copying:
    """How near `samples` are to training images. About 5 % are `nearer` than 95 % of held-out ones without copying."""

    samples: int
    nearer: int
    median_distance: float
    smallest_distance: float
    held_out_median_distance: float

    def describe(self) -> str:
        return (
            f"nearest training images: median distance {self.median_distance:,.0f} for samples, "
            f"{self.held_out_median_distance:,.0f} for held-out images; {self.nearer} of "
            f"{count_words(self.samples, 'sample')} nearer than 95 % of the held-out images, "
            "as about 5 % are by chance"
        )


def measure_copying(
    samples: Pixels, train: ImageSet, held_out: ImageSet, shape: ImageShape, check: Check = never_stop
) -> tuple[Copying, Nearest]:
    """Compare the distances of samples and of held-out images, uint8 [N, H, W, C], to their nearest training image."""
    both = (samples, held_out.images[:_HELD_OUT])
    found, others = (find_nearest(paint(images, shape), train.images, shape, check) for images in both)
    distances, limit = found.distances, np.quantile(others.distances, 0.05)
    nearer = int((distances < limit).sum())
    medians = float(np.median(distances)), float(distances.min()), float(np.median(others.distances))
    return Copying(len(samples), nearer, *medians), found


def find_nearest(
    images: Pixels, others: Pixels | ByteWindows, shape: ImageShape | None = None, check: Check = never_stop
) -> Nearest:
    """Find the nearest of `others` uint8 [M, H, W, C] to each of `images` [N, H, W, C]; the first of equally near ones.

    With a palette in `shape`, `others` hold its numbers, and `images` are RGBA. The Euclidean distance is exact.
    """
    rows = images.reshape(len(images), -1).astype(np.float64)
    sizes, squares = np.square(rows).sum(axis=1), np.full(len(rows), np.inf)
    indices = np.zeros(len(rows), dtype=np.int64)
    block = max(1, min(_PAIRS // len(rows), _VALUES // rows.shape[1]))
    for start in range(0, len(others), block):
        check()
        part = others[start : start + block]
        part = part if shape is None else paint(part, shape)
        numbers = part.reshape(-1, rows.shape[1]).astype(np.float64)
        found = sizes[:, None] - 2 * rows @ numbers.T + np.square(numbers).sum(axis=1)
        least = found.min(axis=1)
        closer = least < squares
        squares[closer], indices[closer] = least[closer], start + found.argmin(axis=1)[closer]
    return Nearest(indices, np.sqrt(squares))


def render_nearest(samples: Pixels, nearest: Pixels) -> Image.Image:
    """Draw samples [N, H, W, C] in rows of 12, each above its training image in `nearest` [N, H, W, C]."""
    rows, scale = [], choose_scale(None, min(len(samples), _ACROSS) * samples.shape[2])
    for start in range(0, len(samples), _ACROSS):
        part = slice(start, start + _ACROSS)
        pair = [render_grid(images[part], _ACROSS, scale) for images in (samples, nearest)]
        rows.append(stack_rows(pair, gap=2))
    return stack_rows(rows)
