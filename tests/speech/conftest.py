"""Tones as spoken symbols: recordings made in the test, in the layout of both kinds of speech data."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import soundfile
import torch
from torch import Tensor

RATE = 8_000

WriteWave = Callable[..., Path]


def make_tone(hertz: float, seconds: float, rate: int = RATE) -> Tensor:
    """A sine [N] that rises and falls, so that it has a beginning and an end."""
    times = torch.arange(round(seconds * rate), dtype=torch.float64) / rate
    return (0.3 * torch.sin(2 * math.pi * hertz * times) * torch.sin(math.pi * times / seconds)).float()


@pytest.fixture
def write_wave(tmp_path: Path) -> WriteWave:
    """Provides `write_wave(name, samples, rate)`, which returns the path."""

    def write(name: str, samples: Tensor, rate: int = RATE) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        soundfile.write(str(path), samples.numpy(), rate, subtype="FLOAT")
        return path

    return write


@pytest.fixture
def tones(tmp_path: Path, write_wave: WriteWave) -> Path:
    """A folder for `speech:DIR`: two speakers say two or three of the symbols a, b and c, which are tones."""
    pitches = {"a": 400.0, "b": 900.0, "c": 1_800.0}
    texts: Sequence[str] = ("a b", "b c a", "c b", "a c b", "b a", "c a b")
    lines = ["file\tspeaker\tsymbols"]
    for speaker, factor in (("ann", 1.0), ("bob", 1.1)):
        for number, text in enumerate(texts):
            name = f"{speaker}-{number}.wav"
            write_wave(f"tones/{name}", torch.cat([make_tone(factor * pitches[one], 0.15) for one in text.split()]))
            lines.append(f"{name}\t{speaker}\t{text}")
    (tmp_path / "tones" / "transcripts.tsv").write_text("\n".join(lines) + "\n")
    return tmp_path / "tones"


@pytest.fixture
def digits(tmp_path: Path, write_wave: WriteWave) -> Path:
    """A data folder with an FSDD of two speakers: each says every digit once, as a tone."""
    for speaker, factor in (("ann", 1.0), ("bob", 1.1)):
        for digit in range(10):
            write_wave(f"data/fsdd/recordings/{digit}_{speaker}_0.wav", make_tone(factor * (300 + 250 * digit), 0.3))
    return tmp_path / "data"
