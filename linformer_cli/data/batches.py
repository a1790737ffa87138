"""The order, shifts, flips and hidden classes of training images, fixed by the seed, so that a run can be resumed."""

import numpy as np
from numpy.typing import NDArray

_EPOCHS_KEPT = 2  # a batch rarely touches more than two epochs; older permutations are dropped
# The second word of the random key is the epoch or, for other purposes, one of these, which no epoch reaches.
_SHIFTS, _CLASSES, _FLIPS = 2**64 - 1, 2**64 - 2, 2**64 - 3
_WORDS_PER_COUNT = 4


class Batches:
    """An endless stream of epochs over `count` images, each a permutation drawn from (seed, epoch).

    The image at a place in the stream, its shift, its flip and whether its class is hidden depend only on `seed`,
    `count` and the place. A trainer that stores how many images it has seen can resume at any batch size.
    """

    def __init__(self, count: int, seed: int) -> None:
        """Raises `ValueError` unless `count` is at least 1 and `seed` lies in [0, 2**64)."""
        if count < 1:
            raise ValueError(f"batches need at least one image, found {count}")
        if not 0 <= seed < 2**64:
            raise ValueError(f"a seed must be in [0, 2**64), found {seed}")
        self.count = count
        self.seed = seed
        self._permutations: dict[int, NDArray[np.int64]] = {}

    def batch(self, start: int, size: int) -> NDArray[np.int64]:
        """Return image indices [size] at places start .. start + size - 1 of the stream, which may span epochs."""
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
        """Return shifts (down, right), int64 [size, 2], uniform over -most .. most pixels, of `batch(start, size)`."""
        # The remainder of a 64-bit word is uniform to within (2 * most + 1) / 2**64.
        chosen = self._draw(_SHIFTS, start, size)[:, :2] % np.uint64(2 * most + 1)
        return chosen.astype(np.int64) - most

    def flips(self, start: int, size: int) -> NDArray[np.bool_]:
        """Return whether to flip each image of `batch(start, size)`, bool [size]: half of them."""
        return self._draw(_FLIPS, start, size)[:, 0] >= 2**63

    def hidden_classes(self, start: int, size: int, share: float) -> NDArray[np.bool_]:
        """Return whether to hide each class of `batch(start, size)`, bool [size], with probability `share`."""
        return self._draw(_CLASSES, start, size)[:, 0] / 2.0**64 < share

    def _draw(self, purpose: int, start: int, size: int) -> NDArray[np.uint64]:
        """Return random words [size, 4] for the places start .. start + size - 1 of the stream."""
        # The place in the stream is the generator's counter, which yields four words.
        key = np.array([self.seed, purpose], dtype=np.uint64)
        words = np.random.Philox(key=key, counter=start).random_raw(size * _WORDS_PER_COUNT)
        return words.reshape(size, _WORDS_PER_COUNT)

    def _permutation(self, epoch: int) -> NDArray[np.int64]:
        if epoch not in self._permutations:
            # numpy guarantees the raw stream of a bit generator across versions, but not Generator.permutation.
            words = np.random.Philox(key=np.array([self.seed, epoch], dtype=np.uint64)).random_raw(self.count)
            while len(self._permutations) >= _EPOCHS_KEPT:
                del self._permutations[next(iter(self._permutations))]
            self._permutations[epoch] = np.argsort(words, kind="stable")
        return self._permutations[epoch]


def shift_images(images: NDArray[np.uint8], shifts: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Shift images uint8 [N, H, W, C] by `shifts` (down, right), int64 [N, 2]. Uncovered pixels repeat the edge."""
    count, height, width, _ = images.shape
    rows = (np.arange(height) - shifts[:, :1]).clip(0, height - 1)
    columns = (np.arange(width) - shifts[:, 1:]).clip(0, width - 1)
    return images[np.arange(count)[:, None, None], rows[:, :, None], columns[:, None, :]]


def flip_images(images: NDArray[np.uint8], flips: NDArray[np.bool_]) -> NDArray[np.uint8]:
    """Return images uint8 [N, H, W, C], those of `flips`, bool [N], mirrored left to right."""
    return np.where(flips[:, None, None, None], images[:, :, ::-1], images)
