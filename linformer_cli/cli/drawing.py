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


def draw(
    sampler: Sampler,
    numbers: ImageNumbers,
    batch: int,
    folder: NumberedImages | None,
    most_shown: int,
    team: Team,
    on_halve: Callable[[int], None],
) -> Drawn:
    """Draw the images of one process of `team` that are not in the folder. Ctrl-C keeps the finished images.

    Images are assigned to the processes in turn, so a stopped job leaves the first images complete. The images are
    written to `folder`, if any, and memory does not grow with their number; the first `most_shown` are for a grid.
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
    return drawn


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
