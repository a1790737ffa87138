"""The tables and the picture of `lintx bench codec`."""

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from linformer_cli.units import format_percent

from .grids import render_grid, stack_rows
from .tables import Column

CODEC_COLUMNS = (
    Column("name", "format", names=True),
    Column("bytes", "bytes", format=","),
    Column("bits_per_dim", "bits/dim", format=".4f"),
    Column("encoded_per_second", "encoded", "images/s", format=".3g"),
    Column("decoded_per_second", "decoded", "images/s", format=".3g"),
    Column("encoding_share", "encoding / drawing", format=format_percent),
    Column("decoding_share", "decoding / drawing", format=format_percent),
    Column("left_out", "left out"),
)
PUBLISHED_COLUMNS = (
    Column("method", "published", names=True),
    Column("bits_per_dim", "bits/dim", format=".2f"),
    Column("source", "source"),
)


def render_bits(images: NDArray[np.uint8], bits: NDArray[np.float64], scale: int | None = None) -> Image.Image:
    """Draw images [N, H, W, C] in a row, and below each its bits [N, H, W, C], summed over the channels.

    White is the 99.5th percentile of all pixels, and black is 0.
    """
    by_pixel = bits.sum(axis=3, keepdims=True)
    most = max(float(np.quantile(by_pixel, 0.995)), 1e-9)
    maps = (by_pixel / most * 255).clip(0, 255).round().astype(np.uint8)
    return stack_rows([render_grid(each, columns=len(each), scale=scale) for each in (images, maps)], gap=2)
