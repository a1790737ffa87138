"""The order in which training meets the images, and how far it moves each: random, yet fixed by the seed alone, so
that it can be resumed.
"""

import numpy as np
from numpy.typing import NDArray

# A batch rarely touches more than two epochs; older permutations are dropped.
_EPOCHS_KEPT = 2
# The second word of a key is the epoch of a permutation, or this, which no epoch reaches.
_SHIFTS = 2**64 - 1
_WORDS_PER_COUNT = 4


class Batches:
    """An endless stream of epochs over `count` images, each epoch a fresh permutation drawn from (seed, epoch).

    Which image stands at a place of the stream depends on `seed`, `count` and the place alone. A trainer that stores
    how many images it has seen therefore resumes exactly, whatever batch size it goes on with. The last permutations
    are kept, so a batch costs a copy of a few indices.
    """

    def __init__(self, count: int, seed: int) -> None:
        """`count` images, at least 1; `seed` in [0, 2**64). Raises `ValueError` otherwise."""
        if count < 1:
            raise ValueError(f"batches need at least one image, found {count}")
        if not 0 <= seed < 2**64:
            raise ValueError(f"a seed lies in [0, 2**64), found {seed}")
        self.count = count
        self.seed = seed
        self._permutations: dict[int, NDArray[np.int64]] = {}

    def batch(self, start: int, size: int) -> NDArray[np.int64]:
        """Image indices [size] at the places start .. start + size - 1 of the stream, across epochs where need be."""
        if start < 0 or size < 1:
            raise ValueError(f"a batch needs start >= 0 and size >= 1, found {start} and {size}")
        pieces = []
        place, end = start, start + size
        while place < end:
            epoch, first = divmod(place, self.count)
            piece = self._permutation(epoch)[first : first + end - place]
            pieces.append(piece)
            place += len(piece)
        return np.concatenate(pieces)

    def shifts(self, start: int, size: int, most: int) -> NDArray[np.int64]:
        """Pixels down and to the right, int64 [size, 2], by which to move the images at these places of the stream.

        Each is uniform over -most .. most, and depends on the seed and the place alone.
        """
        # A place is a count of the generator, which gives four words; two of them are taken. The remainder of a 64-bit
        # word is as good as uniform.
        key = np.array([self.seed, _SHIFTS], dtype=np.uint64)
        words = np.random.Philox(key=key, counter=start).random_raw(size * _WORDS_PER_COUNT)
        chosen = words.reshape(size, _WORDS_PER_COUNT)[:, :2] % np.uint64(2 * most + 1)
        return chosen.astype(np.int64) - most

    def _permutation(self, epoch: int) -> NDArray[np.int64]:
        if epoch not in self._permutations:
            # Sorting raw words instead of Generator.permutation: numpy promises that the raw stream of a bit generator
            # stays the same for ever, but not what its methods make of it, and a resumed run may meet another numpy.
            words = np.random.Philox(key=np.array([self.seed, epoch], dtype=np.uint64)).random_raw(self.count)
            while len(self._permutations) >= _EPOCHS_KEPT:
                del self._permutations[next(iter(self._permutations))]
            self._permutations[epoch] = np.argsort(words, kind="stable")
        return self._permutations[epoch]


def shift_images(images: NDArray[np.uint8], shifts: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Images uint8 [N, H, W, C], each moved by its row of int64 [N, 2] pixels down and to the right.

    What moves in repeats the edge: black around a digit, and around a photograph no frame that it never had.
    """
    count, height, width, _ = images.shape
    rows = (np.arange(height) - shifts[:, :1]).clip(0, height - 1)
    columns = (np.arange(width) - shifts[:, 1:]).clip(0, width - 1)
    moved: NDArray[np.uint8] = images[np.arange(count)[:, None, None], rows[:, :, None], columns[:, None, :]]
    return moved
