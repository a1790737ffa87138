"""Properties of the machine that tests depend on."""

import contextlib
import os
from collections.abc import Iterator

import pytest
import torch

from linformer_cli.native.library import NoLibrary, try_library

HAS_LIBRARY = not isinstance(try_library(), NoLibrary)
NO_LIBRARY = "there is no compiled library"
needs_library = pytest.mark.skipif(not HAS_LIBRARY, reason=NO_LIBRARY)
# The engine that `--engine auto` selects for linear attention in float32.
FASTEST_ENGINE = "native" if HAS_LIBRARY else "reference"
# Triton kernels run on a GPU if there is one, otherwise on the CPU in Triton's interpreter.
TRITON_DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NO_TRITON = "Triton is not installed"
# These metrics depend on the machine, so comparisons of two runs leave them out.
TIMING_METRICS = ("elapsed_seconds", "images_per_second", "peak_memory_bytes")


def prepare_triton() -> None:
    """Choose how Triton runs kernels; call this before the first import of Triton."""
    if TRITON_DEVICE.type == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"


def pin_threads() -> None:
    """Use one thread in every process of the tests, unless `OMP_NUM_THREADS` is set."""
    if "OMP_NUM_THREADS" not in os.environ:
        os.environ["OMP_NUM_THREADS"] = "1"
        torch.set_num_threads(1)


@contextlib.contextmanager
def use_threads(count: int) -> Iterator[None]:
    """Let torch use `count` threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
