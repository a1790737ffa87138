"""The random words of numpy's `Philox` generators, computed in parallel on any device.

Philox4x64-10 (Salmon 2011, 'Parallel random numbers: as easy as 1, 2, 3'): word w of a stream depends only on the
stream's key and w, so the device that uses the numbers can compute them, without waiting for the host.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

_ROUNDS = 10
_MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
_WEYL = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)
_LOW = 2**32 - 1


def draw_uniforms(seed: int, indices: Sequence[int], first: int, count: int, device: torch.device) -> Tensor:
    """Draw numbers first .. first + count - 1 of streams (seed, index): float64 [count, B] in [0, 1), as numpy's."""
    # Each counter gives four words; numpy increments the counter before each draw.
    blocks = torch.arange(first // 4, -(-(first + count) // 4), device=device).unsqueeze(1) + 1
    keys = torch.tensor([list(indices)], dtype=torch.int64, device=device)
    words = draw_words(seed, keys, blocks).flatten(0, 1)[first % 4 :][:count]
    return ((words >> 11) & (2**53 - 1)).double() * 2.0**-53


def draw_words(seed: int, keys: Tensor, counters: Tensor) -> Tensor:
    """Return 64-bit words as int64 [counters, 4, keys]. An int64 product has the same lower bits as an unsigned one."""
    zero = torch.zeros_like(counters + keys)
    words = (zero + counters, zero, zero, zero)
    for turn in range(_ROUNDS):
        (high_0, low_0), (high_2, low_2) = (_multiply(words[place], _MULTIPLIERS[place // 2]) for place in (0, 2))
        key_0, key_1 = _signed(seed + turn * _WEYL[0]), keys + _signed(turn * _WEYL[1])
        words = (high_2 ^ words[1] ^ key_0, low_2, high_0 ^ words[3] ^ key_1, low_0)
    return torch.stack(words, dim=1)


def _multiply(words: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """Return the upper and lower 64 bits of the products, computed in halves because torch has no 128-bit product."""
    low, high = words & _LOW, (words >> 32) & _LOW
    factor_low, factor_high = factor & _LOW, factor >> 32
    cross, other = high * factor_low, low * factor_high
    carried = (((low * factor_low) >> 32) & _LOW) + (cross & _LOW) + (other & _LOW)
    upper = high * factor_high + ((cross >> 32) & _LOW) + ((other >> 32) & _LOW) + (carried >> 32)
    return upper, words * _signed(factor)


def _signed(bits: int) -> int:
    """Return the lower 64 bits, interpreted as a signed integer."""
    bits %= 2**64
    return bits - 2**64 if bits >= 2**63 else bits
