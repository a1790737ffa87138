"""Choices that a short measurement makes, such as the precision to train in; its result is remembered."""

import contextlib
import functools
import json
import math
import time
from collections.abc import Callable

from .documents import read_json
from .errors import LintxError
from .files import user_cache, write_file
from .system.device import Choice, Precision
from .system.environment import processor_name

CLEARLY_FASTER = 1.05  # two formats count as equally fast if their times differ by less than this factor
# The number of rows of the products timed for training, and the seconds after which a measurement begins no new round.
_ROWS, _SECONDS = 256, 0.2
_MOST_ROUNDS = 100


def choose_precision(wanted: Precision, device: str, width: int = 256, feed_forward: int = 1024) -> Choice:
    """Choose a precision for training: for `auto`, bf16 if clearly faster (measured on a CPU), otherwise fp32."""
    import torch

    if wanted != "auto":
        return Choice(wanted, "requested")
    if device == "cpu":
        gain = remember(f"training {width} {feed_forward}: bf16", lambda: measure_bf16_gain(width, feed_forward))
        return Choice("bf16" if gain > CLEARLY_FASTER else "fp32", f"bf16 is {gain:.2g} times as fast as fp32 here")
    if device.startswith("cuda") and torch.cuda.is_bf16_supported():
        return Choice("bf16", "this GPU supports bf16")
    return Choice("fp32", "bf16 is not known to be faster on this device")


@functools.cache
def measure_bf16_gain(width: int, feed_forward: int) -> float:
    """Measure the speed-up of training a feed-forward branch of these widths in bf16 on one thread of the CPU."""
    import torch
    from torch.nn import functional

    with torch.random.fork_rng(devices=[]):
        x = torch.randn(_ROWS, width, requires_grad=True)
        layers = [torch.randn(*shape, requires_grad=True) for shape in ((feed_forward, width), (width, feed_forward))]

    def train(bf16: bool) -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            y = functional.linear(functional.linear(x, layers[0]).relu(), layers[1])
        torch.autograd.grad(y.float().sum(), [x, *layers])

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.enable_grad():
            return measure_gain(lambda: train(False), lambda: train(True))
    finally:
        torch.set_num_threads(threads)


def measure_gain(usual: Callable[[], None], other: Callable[[], None]) -> float:
    """Return the speed of `other` relative to `usual`, by shortest times, because other programs only lengthen them."""
    shortest = [math.inf, math.inf]
    for work in (usual, other):
        work()  # warms up
    began = time.perf_counter()
    for _ in range(_MOST_ROUNDS):
        for index, work in enumerate((usual, other)):
            started = time.perf_counter()
            work()
            shortest[index] = min(shortest[index], time.perf_counter() - started)
        if time.perf_counter() - began > _SECONDS:
            break
    return shortest[0] / shortest[1]


def remember(question: str, measure: Callable[[], float]) -> float:
    """Return the figure for `question` on this processor, torch and number of threads: from the cache or `measure`."""
    import torch

    key = f"{question}; {processor_name()}; torch {torch.__version__}; {torch.get_num_threads()} threads"
    known = _read_figures().get(key)
    if known is None:
        known = measure()
        with contextlib.suppress(LintxError):
            write_file(user_cache() / _FILE, json.dumps({**_read_figures(), key: known}, indent=1).encode())
    return known


_FILE = "measured.json"


def _read_figures() -> dict[str, float]:
    try:
        found = read_json(user_cache() / _FILE)
    except (OSError, ValueError, LintxError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {key: value for key, value in found.items() if isinstance(value, float) and 0 < value < math.inf}
