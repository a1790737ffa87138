"""A folder of drawn images: one PNG each, named by its number, with what it was drawn from in its metadata."""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from linformer_cli.errors import DataError, UsageError
from linformer_cli.files import write_file

from .grids import encode_png, find_png_metadata, render_grid
from .tables import to_json

# What an image does not depend on, or through rounding alone.
_CIRCUMSTANCES = ("checkpoint", "device", "engine", "batch")


class NumberedImages:
    """Images in `folder`, which need not exist yet; `describe(index)` is what determines image number `index`."""

    def __init__(self, folder: Path, describe: Callable[[int], Mapping[str, object]]) -> None:
        self.folder, self.describe = folder, describe

    def path(self, index: int) -> Path:
        return self.folder / f"{index:05d}.png"

    def write(self, index: int, image: NDArray[np.uint8]) -> None:
        """Image number `index`, uint8 [H, W, C]. One that a power cut has damaged can be told by `holds`."""
        write_file(self.path(index), encode_png(render_grid(image[None], scale=1), self.describe(index)), flush=False)

    def holds(self, index: int) -> bool:
        """Whether image number `index` is there, undamaged and drawn from the same.

        Raises `UsageError` where a picture of that name is another program's: nobody could draw it again.
        """
        if not self.path(index).exists():
            return False
        try:
            found = find_png_metadata(self.path(index))
        except DataError:
            return False
        if found is None:
            raise UsageError(f"'{self.path(index)}' is no image that lintx drew; give a folder of their own")
        wanted = json.loads(to_json(dict(self.describe(index))))
        return _essence(found) == _essence(wanted)

    def read(self, indices: Iterable[int]) -> NDArray[np.uint8]:
        """Images number `indices`, uint8 [N, H, W, C]; raises `DataError` for one that cannot be read."""
        return np.stack([self._read_one(index) for index in indices])

    def _read_one(self, index: int) -> NDArray[np.uint8]:
        try:
            with Image.open(self.path(index), formats=["PNG"]) as picture:
                image = np.asarray(picture)
        except (OSError, SyntaxError, ValueError, UnidentifiedImageError) as error:
            raise DataError(f"cannot read {self.path(index)}: {error}") from None
        return image if image.ndim == 3 else image[:, :, None]


def _essence(metadata: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in metadata.items() if name not in _CIRCUMSTANCES}
