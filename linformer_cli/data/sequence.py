"""Images as sequences of values and back, in raster order with the channels of each pixel adjacent."""

from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from linformer_cli.config import ImageShape


def images_to_values(images: NDArray[np.uint8], shape: ImageShape | None = None) -> torch.Tensor:
    """Convert uint8 images [N, H, W, C] to int64 values [N, T] in [0, levels), with T = H * W * C.

    Position t is row t // (W * C), column t // C % W, channel t % C. With fewer than 256 levels, and no palette, the
    brightnesses are divided into ranges of equal length up to one. Raises `ValueError` for a wrong dtype or rank.
    """
    if images.dtype != np.uint8 or images.ndim != 4:
        raise ValueError(f"images must be uint8 [N, H, W, C], found {images.dtype} {list(images.shape)}")
    # Copy the images, because they may be a read-only view of a file.
    values: NDArray[Any] = np.array(images, dtype=np.int64).reshape(images.shape[0], -1)
    if shape is not None and not shape.palette:
        values = values * shape.levels // 256
    return torch.from_numpy(values)


def values_to_images(values: torch.Tensor, shape: ImageShape) -> NDArray[np.uint8]:
    """Convert integer values [N, T] in [0, shape.levels) to uint8 images [N, H, W, C], inverting `images_to_values`.

    With fewer than 256 levels, they are spread evenly over the brightnesses, and rounded up, so that converting back
    changes no value. Raises `ValueError` if T does not match `shape` or a value is out of range.
    """
    if values.ndim != 2 or values.shape[1] != shape.positions:
        raise ValueError(f"values must be [N, {shape.positions}], found {list(values.shape)}")
    array: NDArray[Any] = values.detach().cpu().numpy().astype(np.int64)
    if array.size and (array.min() < 0 or array.max() >= shape.levels):
        raise ValueError(f"values must be in [0, {shape.levels}), found {array.min()} to {array.max()}")
    if not shape.palette:
        array = -(-array * 255 // (shape.levels - 1))
    return array.astype(np.uint8).reshape(-1, shape.height, shape.width, shape.channels)


def paint(images: NDArray[np.uint8], shape: ImageShape) -> NDArray[np.uint8]:
    """Return images [N, H, W, 1] with a palette as RGBA [N, H, W, 4]; other images as they are."""
    return np.array(shape.colours, np.uint8)[images[..., 0]] if shape.palette else images


def find_numbers(pixels: NDArray[np.uint8], colours: ArrayLike) -> NDArray[np.int64]:
    """Find the numbers [...] of the colours of RGBA pixels [..., 4], or -1; the first of equal colours."""
    found, own = (np.ascontiguousarray(each, np.uint8).view(np.uint32)[..., 0] for each in (pixels, colours))
    order = own.argsort(kind="stable")
    numbers = order[np.searchsorted(own, found, sorter=order).clip(max=len(own) - 1)]
    return np.where(own[numbers] == found, numbers, -1)
