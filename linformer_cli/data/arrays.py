"""Arrays in files: which axes of those in `.npy` files mean what, and arrays that are read as they are used."""

import mmap
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from linformer_cli.errors import DataError
from linformer_cli.files import is_special

_CHANNELS = (1, 3, 4)


class MappedArray(np.memmap):
    """A memory-mapped array. Indexing it raises `DataError` if its file was cut short before."""

    def __getitem__(self, index: Any) -> NDArray[Any]:
        mapped: mmap.mmap | None = getattr(self, "_mmap", None)
        if mapped is not None:
            start = self.offset - self.offset % mmap.ALLOCATIONGRANULARITY
            if mapped.size() < start + len(mapped):
                raise DataError(f"{self.filename} became shorter; start again with files that do not change")
        found: NDArray[Any] = super().__getitem__(index)
        is_copy = isinstance(found, MappedArray) and getattr(found, "_mmap", None) is None
        return found.view(np.ndarray) if is_copy else found


def open_array(path: Path) -> NDArray[Any]:
    """Open the array in a file, memory-mapped. Raises `DataError` if it is missing, damaged or no array of numbers."""
    try:
        if is_special(path):
            raise DataError(f"{path} is a pipe or a device; save the array to a file with numpy.save")
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except DataError:
        raise
    except FileNotFoundError as error:
        raise DataError(f"{path} does not exist; save images there with numpy.save, or name another folder") from error
    except OSError as error:
        raise DataError(f"cannot read {path} ({error.strerror or error}); check the file and its rights") from error
    # For damaged files, numpy raises ValueError, EOFError, SyntaxError or UnicodeError.
    except Exception as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise DataError(f"{path} is not a complete .npy file of numbers ({reason}); save it with numpy.save") from error
    if not isinstance(array, np.ndarray):  # an .npz archive whose name ends in .npy
        array.close()
        raise DataError(f"{path} is an archive of several arrays; save only the images, with numpy.save")
    return array.view(MappedArray)


def arrange_images(array: NDArray[Any], path: Path) -> NDArray[Any]:
    """Return the images [N, H, W, C] of a data set's array. Raises `DataError` if its axes are not certain."""
    if array.dtype.kind not in "buif":
        raise DataError(f"{path}: pixels must be numbers, such as uint8 (0 to 255), found {array.dtype}")
    if array.ndim == 3:
        array = array[..., None]
    if array.ndim == 4 and array.shape[3] not in _CHANNELS and array.shape[1] in _CHANNELS and min(array.shape[2:]) > 4:
        array = np.moveaxis(array, 1, 3)
    if array.ndim != 4 or array.shape[3] not in _CHANNELS:
        found = f"found {list(array.shape)}; {_suggest(array.shape, path)}"
        raise DataError(f"{path}: images must be [N, H, W] or [N, H, W, C] with 1, 3 or 4 channels, {found}")
    if array.size == 0:
        raise DataError(f"{path}: found no images (shape {list(array.shape)}); save at least one")
    return array.astype(np.uint8) * np.uint8(255) if array.dtype == np.bool_ else array


def arrange_picture(array: NDArray[Any], path: Path) -> NDArray[Any]:
    """Return the images [N, H, W, C] of a file in a folder of pictures: one image [H, W] or [H, W, C], or several."""
    if array.ndim == 3 and array.shape[2] not in _CHANNELS and array.shape[0] in _CHANNELS:
        raise DataError(
            f"{path}: {list(array.shape)} is one image with its channels first, or {array.shape[0]} grey images; save "
            "numpy.moveaxis(array, 0, 2) or array[..., None] instead"
        )
    one = array.ndim == 2 or (array.ndim == 3 and array.shape[2] in _CHANNELS)
    return arrange_images(array[None] if one else array, path)


def _suggest(shape: tuple[int, ...], path: Path) -> str:
    save = f"numpy.save('{path.name}', array"
    if len(shape) == 2 and (side := round(shape[1] ** 0.5)) ** 2 == shape[1] and side > 1:
        return f"for square images: {save}.reshape(-1, {side}, {side}))"
    if len(shape) == 4 and 2 in (shape[1], shape[3]):
        one = "[..., 0]" if shape[3] == 2 else "[:, 0]"
        return f"for the first channel alone: {save}{one})"
    if len(shape) == 5:
        return f"for a single sequence of images: {save}.reshape(-1, *array.shape[2:]))"
    return "give it these axes with numpy.reshape or numpy.moveaxis, and save it again"
