"""Random numbers that depend only on a seed."""

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Within the block, torch's random numbers depend only on `seed`. Those of the CPU after it do not depend on it."""
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield
