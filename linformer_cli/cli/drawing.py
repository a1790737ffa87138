"""The work of `lintx sample`: numbered images, in memory or in a folder, drawn by one process or by several."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from linformer_cli.data.sequence import values_to_images
from linformer_cli.report.numbered import NumberedImages
from linformer_cli.sampling.decode import Sampler
from linformer_cli.system.distributed import Team

# The number of files in a folder that are looked for at once.
_BLOCK = 2**16


@dataclass(frozen=True)
class ImageNumbers:
    """The numbers of the images to draw, counted from `first`: `each` images of every class in `chosen`.

    Without `chosen`, there are `each` images in total, which rotate through the classes 0 to `turns` - 1, or have no
    class if `turns` is 0.
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
        """Return the class of image number `index`, or None if it has none."""
        return self[index] if self.have_class else None

    def __getitem__(self, index: int, /) -> int:
        return self.chosen[(index - self.first) // self.each] if self.chosen else index % self.turns


@dataclass
class Drawn:
    """How many images were `drawn`, how many were in the folder before, and the first numbers of both, for a grid.

    Without a folder, the images themselves, uint8 [H, W, C], are kept here. `passes` counts the passes through the
    layers, summed over the images. `seconds` leave out the search in the folder. `stopped` is true if Ctrl-C ended the
    work early.
    """

    drawn: int = 0
    found: int = 0
    shown: list[int] = field(default_factory=list)
    images: dict[int, NDArray[np.uint8]] = field(default_factory=dict)
    state_bytes: int = 0
    passes: int = 0
    seconds: float = 0.0
    stopped: bool = False

    def stack(self, indices: Iterable[int]) -> NDArray[np.uint8]:
        """Return the images with these numbers, uint8 [N, H, W, C]."""
        return np.stack([self.images[index] for index in indices])


@dataclass(frozen=True)
class Drawing:
    """The images to draw, in batches, and the folder to write them to, if any. The first images are for a grid."""

    numbers: ImageNumbers
    batch: int
    folder: NumberedImages | None
    most_shown: int

    def draw(self, sampler: Sampler, team: Team, on_halve: Callable[[int], None]) -> Drawn:
        """Draw the images of one process of `team` that are not in the folder. Ctrl-C keeps the finished images.

        Images are assigned to the processes in turn, so a stopped job leaves the first images complete. Memory does not
        grow with the number of images in the folder.
        """
        drawn = Drawn()
        own = self.numbers.all[team.rank :: team.count]
        block = _BLOCK if self.folder is not None else max(1, len(own))
        try:
            for start in range(0, len(own), block):
                missing = self._find_missing(own[start : start + block], drawn)
                began = time.perf_counter()
                try:
                    self._draw_block(sampler, missing, drawn, on_halve)
                finally:
                    drawn.seconds += time.perf_counter() - began
        except KeyboardInterrupt:
            drawn.stopped = True
        return drawn

    def _find_missing(self, indices: range, drawn: Drawn) -> Sequence[int]:
        if self.folder is None or not self.folder.folder.exists():
            return indices
        missing = []
        for index in indices:
            if self.folder.holds(index):
                drawn.found += 1
                self._show(index, drawn)
            else:
                missing.append(index)
        return missing

    def _draw_block(
        self, sampler: Sampler, indices: Sequence[int], drawn: Drawn, on_halve: Callable[[int], None]
    ) -> None:
        labels = self.numbers if self.numbers.have_class else None
        for part in sampler.iter_batches(indices, self.batch, labels, on_halve=on_halve):
            drawn.state_bytes = max(drawn.state_bytes, part.state_bytes)
            drawn.passes += part.passes * len(part.indices)
            images = values_to_images(part.values, sampler.model.config.image)
            for index, image in zip(part.indices, images, strict=True):
                if self.folder is None:
                    drawn.images[index] = image
                else:
                    self.folder.write(index, image)  # immediately, so that a stopped job keeps its finished images
                drawn.drawn += 1
                self._show(index, drawn)

    def _show(self, index: int, drawn: Drawn) -> None:
        if self.folder is None or index - self.numbers.first < self.most_shown:
            drawn.shown.append(index)


def add_up(parts: Sequence[Drawn]) -> Drawn:
    """Combine the results of all processes."""
    total = Drawn()
    for part in parts:
        total.drawn += part.drawn
        total.found += part.found
        total.shown += part.shown
        total.images |= part.images
        total.state_bytes = max(total.state_bytes, part.state_bytes)
        total.passes += part.passes
        total.seconds = max(total.seconds, part.seconds)
        total.stopped = total.stopped or part.stopped
    total.shown.sort()
    return total
