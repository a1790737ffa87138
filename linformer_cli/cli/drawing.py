"""The work of `lintx sample`: numbered images, in memory or in a folder, drawn by one process or by several."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from linformer_cli.data.sequence import values_to_images
from linformer_cli.report.numbered import NumberedImages
from linformer_cli.sampling.decode import Sampler
from linformer_cli.system.distributed import Team


@dataclass(frozen=True)
class ImageNumbers:
    """The numbers of the images to draw, counted from `first`: `each` images of every class in `chosen`.

    Without `chosen`, there are `each` images in total, which rotate through all `classes` if the model has classes.
    """

    first: int
    each: int
    chosen: Sequence[int]
    classes: int

    @property
    def all(self) -> range:
        return range(self.first, self.first + self.each * max(1, len(self.chosen)))

    def class_of(self, index: int) -> int | None:
        """Return the class of image number `index`, or None if the model has no classes."""
        return self[index] if self.classes else None

    def __getitem__(self, index: int, /) -> int:
        return self.chosen[(index - self.first) // self.each] if self.chosen else index % max(1, self.classes)


@dataclass
class Drawn:
    """The numbers of the drawn images. The images themselves, uint8 [H, W, C], are kept here if there is no folder.

    `passes` counts the passes through the layers, summed over the images. `stopped` is true if Ctrl-C ended the work
    early.
    """

    indices: list[int] = field(default_factory=list)
    images: dict[int, NDArray[np.uint8]] = field(default_factory=dict)
    state_bytes: int = 0
    passes: int = 0
    stopped: bool = False

    def stack(self, indices: Iterable[int]) -> NDArray[np.uint8]:
        """Return the images with these numbers, uint8 [N, H, W, C]."""
        return np.stack([self.images[index] for index in indices])


def find_drawn(wanted: range, folder: NumberedImages | None, team: Team) -> set[int]:
    """Return which of the `wanted` images are already in the folder. The processes share the search."""
    if folder is None:
        return set()
    mine = team.share(len(wanted)) if folder.folder.exists() else range(0)
    found = {index for index in wanted[mine.start : mine.stop] if folder.holds(index)}
    return set[int]().union(*team.gather(found))


def draw_images(
    sampler: Sampler,
    indices: Sequence[int],
    batch: int,
    numbers: ImageNumbers,
    folder: NumberedImages | None,
    on_halve: Callable[[int], None],
) -> Drawn:
    """Draw the images `indices` and write them to the folder if there is one. Ctrl-C keeps the finished images."""
    drawn = Drawn()
    labels = numbers if numbers.classes else None
    try:
        for part in sampler.iter_batches(indices, batch, labels, on_halve=on_halve):
            drawn.state_bytes = max(drawn.state_bytes, part.state_bytes)
            drawn.passes += part.passes * len(part.indices)
            images = values_to_images(part.values, sampler.model.config.image)
            for index, image in zip(part.indices, images, strict=True):
                if folder is None:
                    drawn.images[index] = image
                else:
                    folder.write(index, image)  # immediately, so that a stopped job keeps its finished images
                drawn.indices.append(index)
    except KeyboardInterrupt:
        drawn.stopped = True
    return drawn


def add_up(parts: Sequence[Drawn]) -> Drawn:
    """Combine the results of all processes."""
    total = Drawn()
    for part in parts:
        total.indices += part.indices
        total.images |= part.images
        total.state_bytes = max(total.state_bytes, part.state_bytes)
        total.passes += part.passes
        total.stopped = total.stopped or part.stopped
    return total
