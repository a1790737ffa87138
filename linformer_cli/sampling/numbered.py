"""Numbered images, drawn by one process or by several: in memory, or as files with their settings in the metadata."""

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from linformer_cli.data.sequence import values_to_images
from linformer_cli.errors import DataError, UsageError, shorten
from linformer_cli.files import write_file
from linformer_cli.report.grids import encode_png, read_png, read_png_metadata, to_picture
from linformer_cli.report.tables import to_json
from linformer_cli.system.distributed import Team
from .decode import Sampler

_BLOCK = 2**16  # the number of files in a folder that are looked for at once
_CIRCUMSTANCES = ("checkpoint", "device", "engine", "batch")  # metadata that affects an image at most by rounding


@dataclass(frozen=True)
class NumberedImages:
    """Images in `folder`, which may be new, with the metadata `describe(index)` and the `colours` of a palette."""

    folder: Path
    describe: Callable[[int], Mapping[str, object]]
    colours: Sequence[tuple[int, ...]] = ()

    def path(self, index: int) -> Path:
        return self.folder / f"{index:05d}.png"

    def write(self, index: int, image: NDArray[np.uint8]) -> None:
        """Write image number `index`, uint8 [H, W, C]. A power cut may damage the file; `holds` detects this."""
        write_file(self.path(index), encode_png(to_picture(image, self.colours), self.describe(index)), flush=False)

    def holds(self, index: int) -> bool:
        """Return whether image `index` exists undamaged. Raises `UsageError` for a file of others, to keep it."""
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
        return np.stack([np.atleast_3d(np.asarray(read_png(self.path(index)))) for index in indices])


@dataclass(frozen=True)
class ImageNumbers:
    """The numbers of the images to draw, counted from `first`: `each` images of every class in `chosen`.

    Without `chosen`, there are `each` in total, of the classes 0 to `turns` - 1 in turn, or without a class.
    """

    first: int
    each: int
    chosen: Sequence[int]
    turns: int

    @property
    def all(self) -> range:
        return range(self.first, self.first + self.each * max(1, len(self.chosen)))

    @property
    def have_class(self) -> bool:
        return bool(self.chosen) or self.turns > 0

    def class_of(self, index: int) -> int | None:
        return self[index] if self.have_class else None

    def __getitem__(self, index: int, /) -> int:
        return self.chosen[(index - self.first) // self.each] if self.chosen else index % self.turns


@dataclass
class Drawn:
    """How many images were `drawn`, how many were in the folder before, and the first numbers of both, for a grid.

    Without a folder, the images, uint8 [H, W, C], are kept here. `passes` through the layers are summed over images.
    `seconds` leave out the search in the folder.
    """

    drawn: int = 0
    found: int = 0
    shown: list[int] = field(default_factory=list)
    images: dict[int, NDArray[np.uint8]] = field(default_factory=dict)
    state_bytes: int = 0
    passes: int = 0
    seconds: float = 0.0
    stopped: bool = False

    @property
    def done(self) -> int:
        return self.drawn + self.found

    def stack(self, indices: Iterable[int]) -> NDArray[np.uint8]:
        return np.stack([self.images[index] for index in indices])


def draw_images(
    sampler: Sampler,
    numbers: ImageNumbers,
    batch: int,
    folder: NumberedImages | None,
    most_shown: int,
    team: Team,
    on_halve: Callable[[int], None],
) -> Drawn:
    """Draw the images that are not in the folder, and return what all processes of `team` did. Ctrl-C keeps images.

    Processes take images in turn, so a stopped job leaves the first ones. With a `folder`, memory does not grow.
    """
    drawn, labels = Drawn(), numbers if numbers.have_class else None
    own = numbers.all[team.rank :: team.count]
    block = _BLOCK if folder is not None else max(1, len(own))

    def show(index: int) -> None:
        if folder is None or index - numbers.first < most_shown:
            drawn.shown.append(index)

    def find_missing(indices: range) -> Sequence[int]:
        if folder is None or not folder.folder.exists():
            return indices
        missing = []
        for index in indices:
            if folder.holds(index):
                drawn.found += 1
                show(index)
            else:
                missing.append(index)
        return missing

    def draw_block(indices: Sequence[int]) -> None:
        for part in sampler.iter_batches(indices, batch, labels, on_halve=on_halve):
            drawn.state_bytes = max(drawn.state_bytes, part.state_bytes)
            drawn.passes += part.passes * len(part.indices)
            images = values_to_images(part.values, sampler.model.config.image)
            for index, image in zip(part.indices, images, strict=True):
                if folder is None:
                    drawn.images[index] = image
                else:
                    folder.write(index, image)  # immediately, so that a stopped job keeps its finished images
                drawn.drawn += 1
                show(index)

    try:
        for start in range(0, len(own), block):
            missing = find_missing(own[start : start + block])
            began = time.perf_counter()
            try:
                draw_block(missing)
            finally:
                drawn.seconds += time.perf_counter() - began
    except KeyboardInterrupt:
        drawn.stopped = True
    return _add_up(team.gather(drawn))


def _add_up(parts: Sequence[Drawn]) -> Drawn:
    return Drawn(
        sum(part.drawn for part in parts),
        sum(part.found for part in parts),
        sorted(index for part in parts for index in part.shown),
        {index: image for part in parts for index, image in part.images.items()},
        max(part.state_bytes for part in parts),
        sum(part.passes for part in parts),
        max(part.seconds for part in parts),
        any(part.stopped for part in parts),
    )
