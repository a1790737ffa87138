"""Reads sound files as mono samples at a given rate; log-mel filterbanks, as in Katharopoulos 2020, section 4.3."""

import functools
import math
import re
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from linformer_cli.errors import DataError
from linformer_cli.system.environment import import_extra

LOWEST_RATE, HIGHEST_RATE = 4_000, 192_000
# Zero crossings of the filter on each side; its cut-off, times the lower Nyquist frequency, as it is not steep.
_ZERO_CROSSINGS, _ROLLOFF = 16, 0.94
_BLOCK = 2**14
_UNKNOWN_SIZE = 2**31 - 2**20  # programs that write to a pipe leave about this size, or a larger one, in the header
_SILENT = 2.0**-15  # a recording is silent if no sample reaches one step of 16 bits


@dataclass(frozen=True)
class Wave:
    """Samples float32 [N] at `rate` per second."""

    samples: Tensor
    rate: int

    @property
    def is_silent(self) -> bool:
        return bool(self.samples.abs().max() < _SILENT)


def read_rate(path: Path) -> int:
    """Return the sample rate of a file. Raises `DataError` if the file is missing or is not sound."""
    soundfile = import_extra("soundfile", "speech")
    try:
        return int(soundfile.info(str(path)).samplerate)
    except (OSError, RuntimeError) as error:  # libsndfile's errors are RuntimeErrors
        raise _unreadable(path, error) from None


def read_wave(path: Path, rate: int | None = None) -> Wave:
    """Read a file, take the mean of its channels, and resample it to `rate`, unless that is None.

    Raises `DataError` if it is damaged, empty or cut short, or has NaN, infinity or an unusual rate.
    """
    soundfile = import_extra("soundfile", "speech")
    try:
        with soundfile.SoundFile(str(path)) as file:
            file_rate, remarks = file.samplerate, file.extra_info
            data = file.read(dtype="float32", always_2d=True)
    except (OSError, RuntimeError) as error:
        raise _unreadable(path, error) from None
    for told, found in re.findall(r": (\d+) \(should be (\d+)\)", remarks):
        if int(found) < int(told) < _UNKNOWN_SIZE:
            hint = "copy it again or leave it out"
            raise DataError(f"'{path}' is cut short: its header says {int(told):,} bytes, found {int(found):,}; {hint}")
    if not LOWEST_RATE <= file_rate <= HIGHEST_RATE:
        hint = f"lintx reads {LOWEST_RATE:,} to {HIGHEST_RATE:,}"
        raise DataError(f"'{path}' has {file_rate:,} samples per second; {hint}")
    samples = torch.from_numpy(data).mean(dim=1)
    if not len(samples):
        raise DataError(f"'{path}' has no samples; record it again or leave it out")
    if not samples.isfinite().all():
        raise DataError(f"'{path}' has samples that are NaN or infinite; record it again or leave it out")
    wanted = rate or file_rate
    return Wave(resample(samples, file_rate, wanted), wanted)


def resample(samples: Tensor, rate: int, wanted: int) -> Tensor:
    """Resample [N] to [ceil(N wanted / rate)] by a sinc with a Hann window, cut off below both Nyquist frequencies."""
    if rate == wanted:
        return samples
    cutoff = _ROLLOFF * min(1.0, wanted / rate)
    half = math.ceil(_ZERO_CROSSINGS / cutoff)
    padded = functional.pad(samples.double(), (half, half))
    near = torch.arange(1 - half, half + 1)
    parts = []
    for numbers in torch.arange(math.ceil(len(samples) * wanted / rate)).split(_BLOCK):
        times = numbers.double().unsqueeze(1) * rate / wanted  # in samples of the input
        first = times.floor().long()
        distance = times - first - near
        window = torch.cos(distance * (math.pi / 2 / half)).square()
        weights = cutoff * torch.sinc(cutoff * distance) * window
        parts.append((padded[first + near + half] * weights).sum(dim=1))
    return torch.cat(parts).to(samples.dtype)


def _unreadable(path: Path, error: Exception) -> DataError:
    if not path.exists():
        return DataError(f"'{path}' does not exist; check the name")
    reason = str(getattr(error, "error_string", "") or error).strip().rstrip(".").splitlines()
    return DataError(f"cannot read '{path}' as sound ({reason[-1] if reason else 'unknown format'}); save it as WAV")


BANDS = 40
WINDOW_SECONDS, HOP_SECONDS = 0.025, 0.010
_LOWEST_HERTZ = 20.0
# Added to the power of a band. A full-scale sine has a power of about 1e4, so this is far below any recording's noise.
_FLOOR = 1e-8
_LEAST_DEVIATION = 1e-3  # a band that never changes is not scaled up


def log_mel(samples: Tensor, rate: int) -> Tensor:
    """Return the logarithm of the power in 40 bands, [T, 40], for samples [N] at `rate` per second.

    A Hann window of 25 ms starts every 10 ms. Bands are triangles, equally wide in mel, from 20 Hz to rate / 2.
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
