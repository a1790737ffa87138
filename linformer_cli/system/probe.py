"""A short measurement that decides which precision `auto` chooses for training on this CPU."""

import functools
import time

# The number of rows of the timed products, and the seconds after which no new round begins.
_ROWS, _SECONDS = 256, 0.2


@functools.cache
def measure_bf16_gain(width: int, feed_forward: int) -> float:
    """The speed-up of training a feed-forward branch on the CPU under bf16 autocast, relative to float32.

    The branch maps `width` to `feed_forward` and back. The two formats alternate in one thread. Their shortest times
    are compared, because other programs can only lengthen a time.
    """
    import torch
    from torch.nn import functional

    with torch.random.fork_rng(devices=[]):
        x = torch.randn(_ROWS, width, requires_grad=True)
        layers = [torch.randn(*shape, requires_grad=True) for shape in ((feed_forward, width), (width, feed_forward))]

    def train(bf16: bool) -> float:
        began = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            y = functional.linear(functional.linear(x, layers[0]).relu(), layers[1])
        torch.autograd.grad(y.float().sum(), [x, *layers])
        return time.perf_counter() - began

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.enable_grad():
            train(True), train(False)  # warms up the kernels
            began = time.perf_counter()
            rounds: list[tuple[float, float]] = []
            while not rounds or time.perf_counter() - began < _SECONDS:
                rounds.append((train(False), train(True)))
    finally:
        torch.set_num_threads(threads)
    float32, bf16 = (min(times) for times in zip(*rounds, strict=True))
    return float(float32 / bf16)
