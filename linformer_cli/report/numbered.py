"""A folder of sampled images. Each image is a numbered PNG with its sampling settings in the metadata."""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from linformer_cli.errors import DataError, UsageError, shorten
from linformer_cli.files import write_file

from .grids import encode_png, read_png, read_png_metadata, render_grid
from .tables import to_json

# Metadata that affects an image at most by rounding.
_CIRCUMSTANCES = ("checkpoint", "device", "engine", "batch")


class NumberedImages:
    """Images in `folder`. The folder need not exist yet. `describe(index)` is the metadata of image number `index`."""

    def __init__(self, folder: Path, describe: Callable[[int], Mapping[str, object]]) -> None:
        self.folder, self.describe = folder, describe

    def path(self, index: int) -> Path:
        return self.folder / f"{index:05d}.png"

    def write(self, index: int, image: NDArray[np.uint8]) -> None:
        """Write image number `index`, uint8 [H, W, C]. A power cut may damage the file; `holds` detects this."""
        write_file(self.path(index), encode_png(render_grid(image[None], scale=1), self.describe(index)), flush=False)

    def holds(self, index: int) -> bool:
        """Whether image number `index` exists and is undamaged.

        Raises `UsageError` if the file belongs to another program, or if the image was sampled with other settings,
        because it must not be overwritten.
        """
        if not self.path(index).exists():
            return False
        try:
            found = read_png_metadata(self.path(index))
        except DataError:
            return False
        if found is None:
            raise UsageError(f"'{self.path(index)}' was not written by lintx; choose another folder")
        wanted = json.loads(to_json(dict(self.describe(index))))
        for name in {**wanted, **found}:
            if name not in _CIRCUMSTANCES and found.get(name) != wanted.get(name):
                settings = f"{name} {shorten(str(found.get(name)))}, not {wanted.get(name)}"
                raise UsageError(f"'{self.path(index)}' was drawn with {settings}; choose another folder")
        return True

    def read(self, indices: Iterable[int]) -> NDArray[np.uint8]:
        """Return the images `indices`, uint8 [N, H, W, C]. Raises `DataError` if an image cannot be read."""
        return np.stack([self._read_one(index) for index in indices])

    def _read_one(self, index: int) -> NDArray[np.uint8]:
        image = np.asarray(read_png(self.path(index)))
        return image if image.ndim == 3 else image[:, :, None]
