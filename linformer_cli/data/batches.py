"""The order in which training meets the images: random, yet fixed by the seed alone, so that it can be resumed."""

import numpy as np
from numpy.typing import NDArray

# A batch rarely touches more than two epochs; older permutations are dropped.
_EPOCHS_KEPT = 2


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

    def _permutation(self, epoch: int) -> NDArray[np.int64]:
        if epoch not in self._permutations:
            # Sorting raw words instead of Generator.permutation: numpy promises that the raw stream of a bit generator
            # stays the same for ever, but not what its methods make of it, and a resumed run may meet another numpy.
            words = np.random.Philox(key=np.array([self.seed, epoch], dtype=np.uint64)).random_raw(self.count)
            while len(self._permutations) >= _EPOCHS_KEPT:
                del self._permutations[next(iter(self._permutations))]
            self._permutations[epoch] = np.argsort(words, kind="stable")
        return self._permutations[epoch]
