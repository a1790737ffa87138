"""Log-mel filterbanks, 40 of them as in Katharopoulos 2020, section 4.3."""

import functools
import math

import torch
from torch import Tensor

BANDS = 40
WINDOW_SECONDS, HOP_SECONDS = 0.025, 0.010
_LOWEST_HERTZ = 20.0
# Added to the power of a band. A full-scale sine has a power of about 1e4, so this is far below any recording's noise.
_FLOOR = 1e-8
# A band that never changes is not scaled up.
_LEAST_DEVIATION = 1e-3


def log_mel(samples: Tensor, rate: int) -> Tensor:
    """Return the logarithm of the power in 40 bands, [T, 40], for samples [N] at `rate` per second.

    The windows are 25 ms long (Hann), and there is one every 10 ms, so T is 1 + N / (rate / 100) rounded down. The
    bands are triangles that are equally wide in mel, from 20 Hz to half the rate.
    """
    window, hop = round(WINDOW_SECONDS * rate), round(HOP_SECONDS * rate)
    size = 2 ** (math.ceil(math.log2(window)) + 1)  # zero-padded, so that the lowest bands contain several bins
    spectrum = torch.stft(
        samples,
        size,
        hop,
        window,
        torch.hann_window(window, device=samples.device),
        center=True,
        pad_mode="constant",
        return_complex=True,
    )
    power = spectrum.real.square() + spectrum.imag.square()
    return torch.log(mel_filters(size, rate).to(power) @ power + _FLOOR).T


def normalise(features: Tensor) -> Tensor:
    """Scale each band of [T, 40] to mean 0 and deviation 1 over the utterance. This removes level and microphone."""
    deviation, mean = torch.std_mean(features, dim=0, correction=0)
    return (features - mean) / deviation.clamp(min=_LEAST_DEVIATION)


@functools.cache
def mel_filters(size: int, rate: int) -> Tensor:
    """Return the weights [40, size / 2 + 1] of the bands. Each band has a peak of 1."""
    hertz = torch.linspace(0, rate / 2, size // 2 + 1, dtype=torch.float64)
    ends = torch.tensor([_LOWEST_HERTZ, rate / 2], dtype=torch.float64)
    low, high = (2595 * torch.log10(1 + ends / 700)).tolist()  # O'Shaughnessy 1987
    corners = 700 * (10 ** (torch.linspace(low, high, BANDS + 2, dtype=torch.float64) / 2595) - 1)
    left, peak, right = (corners[start : start + BANDS, None] for start in range(3))
    rising, falling = (hertz - left) / (peak - left), (right - hertz) / (right - peak)
    return torch.minimum(rising, falling).clamp(min=0).float()
