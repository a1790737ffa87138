"""The tables and the picture of `lintx bench quality`."""

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from linformer_cli.units import format_percent

from .grids import render_grid, stack_rows
from .tables import Column

QUALITY_COLUMNS = (
    Column("name", "", names=True),
    Column("images", "images", format=","),
    Column("bits_per_dim", "bits/dim", format=".4f"),
    Column("frechet_distance", "Frechet distance", format=".3g"),
    Column("sure_share", "sure", format=format_percent),
    Column("class_share", "right class", format=format_percent),
    Column("nearest_distance", "nearest training image", format=",.0f"),
    Column("smallest_distance", "smallest", format=",.0f"),
)
CLASS_COLUMNS = (
    Column("label", "class", names=True),
    Column("samples", "samples", format=","),
    Column("recognised", "recognised", format=","),
    Column("accuracy", "judge's accuracy", format=format_percent),
)

_COLUMNS = 12


def render_nearest(samples: NDArray[np.uint8], nearest: NDArray[np.uint8]) -> Image.Image:
    """Draw samples [N, H, W, C] in rows of 12, each above its training image in `nearest` [N, H, W, C]."""
    rows = []
    for start in range(0, len(samples), _COLUMNS):
        part = slice(start, start + _COLUMNS)
        rows.append(stack_rows([render_grid(images[part], columns=_COLUMNS) for images in (samples, nearest)], gap=2))
    return stack_rows(rows)
