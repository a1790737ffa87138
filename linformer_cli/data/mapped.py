"""Arrays in files that are read as they are used."""

import mmap
from typing import Any

import numpy as np
from numpy.typing import NDArray

from linformer_cli.errors import DataError


class MappedArray(np.memmap):
    """A memory-mapped array. Indexing it raises `DataError` if its file was cut short, which would end the process.

    A file that is cut short while it is indexed still ends the process.
    """

    def __getitem__(self, index: Any) -> NDArray[Any]:
        mapped: mmap.mmap | None = getattr(self, "_mmap", None)
        if mapped is not None:
            start = self.offset - self.offset % mmap.ALLOCATIONGRANULARITY
            if mapped.size() < start + len(mapped):
                raise DataError(f"{self.filename} became shorter; start again with files that do not change")
        found: NDArray[Any] = super().__getitem__(index)
        is_copy = isinstance(found, MappedArray) and getattr(found, "_mmap", None) is None
        return found.view(np.ndarray) if is_copy else found
