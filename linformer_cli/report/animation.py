"""Animated GIFs that show images being sampled row by row."""

import io
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from .grids import BACKGROUND
from .tables import to_json

MOST_FRAMES = 64
FRAME_MILLISECONDS = 60
LAST_MILLISECONDS = 2000  # time to look at the result


def frame_rows(height: int, first: int = 0) -> list[int]:
    """Return the rows shown in each frame, from `first` to `height`. Each adds one row, or several for tall images."""
    count = min(height - first, MOST_FRAMES)
    return [first + round(index * (height - first) / count) for index in range(count)] + [height]


def hide_rows(images: NDArray[np.uint8], shown: int, kept: NDArray[np.bool_] | None = None) -> NDArray[np.uint8]:
    """Return a copy of images [N, H, W, C] in which only the first `shown` rows and `kept` pixels [H, W] show."""
    hidden = images.copy()
    unseen = np.ones(images.shape[1:3], bool) if kept is None else ~kept
    unseen[:shown] = False
    hidden[:, unseen] = BACKGROUND
    hidden[..., 3:][:, unseen] = 255
    return hidden


def encode_gif(frames: Sequence[Image.Image], metadata: Mapping[str, object]) -> bytes:
    """Encode `frames` of one size as an endlessly repeating GIF with `metadata` as its comment."""
    durations = [FRAME_MILLISECONDS] * (len(frames) - 1) + [LAST_MILLISECONDS]
    buffer = io.BytesIO()
    frames[0].save(
        buffer,
        format="GIF",
        save_all=True,
        append_images=list(frames[1:]),
        duration=durations,
        loop=0,
        comment=to_json(dict(metadata), compact=True).encode(),
    )
    return buffer.getvalue()
