"""Tests of reading and resampling sound files."""

import math

import pytest
import soundfile
import torch
from loops import loop_over

from linformer_cli.errors import DataError
from linformer_cli.speech.waves import read_wave, resample


@pytest.mark.parametrize(("rate", "wanted"), [(16_000, 8_000), (44_100, 8_000), (8_000, 16_000), (11_025, 8_000)])
def test_a_resampled_sine_is_the_sine_at_the_other_rate(rate: int, wanted: int) -> None:
    def sine(rate: int) -> torch.Tensor:
        return torch.sin(2 * math.pi * 1_000 * torch.arange(rate // 2).double() / rate)

    found = resample(sine(rate), rate, wanted)
    assert len(found) == math.ceil(rate // 2 * wanted / rate)
    inside = slice(100, 3_900)  # the ends miss neighbours
    torch.testing.assert_close(found[inside], sine(wanted)[inside], atol=1e-3, rtol=0)


def test_resampling_removes_what_the_lower_rate_cannot_hold() -> None:
    high = torch.sin(2 * math.pi * 5_000 * torch.arange(8_000).double() / 16_000)
    assert resample(high, 16_000, 8_000)[100:-100].abs().max() < 1e-3


def test_a_long_recording_is_resampled_in_blocks_without_seams() -> None:
    samples = torch.randn(100_000, generator=torch.Generator().manual_seed(0)).double()
    whole, cut = resample(samples, 16_000, 8_000), resample(samples[20_000:60_000], 16_000, 8_000)
    torch.testing.assert_close(whole[10_100:29_900], cut[100:19_900])


def test_channels_are_averaged_and_the_rate_is_changed(tmp_path) -> None:
    path = tmp_path / "two.wav"
    soundfile.write(str(path), torch.tensor([[0.5, 0.0]] * 16_000).numpy(), 16_000, subtype="FLOAT")
    wave = read_wave(path, 8_000)
    assert (len(wave.samples), wave.rate) == (8_000, 8_000)
    torch.testing.assert_close(wave.samples[100:-100], torch.full((7_800,), 0.25), atol=1e-3, rtol=0)


def test_an_unusable_file_is_named_in_one_line(tmp_path, write_wave) -> None:
    broken = tmp_path / "broken.wav"
    broken.write_bytes(b"RIFF\x00\x00")
    cases = {
        broken: "cannot read '.*broken.wav' as sound",
        tmp_path / "missing.wav": "'.*missing.wav' does not exist",
        write_wave("empty.wav", torch.zeros(0)): "has no samples",
        write_wave("nan.wav", torch.tensor([0.1, math.nan])): "NaN or infinite",
        write_wave("slow.wav", torch.ones(100), 1_000): "has 1,000 samples per second",
    }
    for path, message in cases.items():
        with pytest.raises(DataError, match=message) as found:
            read_wave(path)
        assert "\n" not in str(found.value)


@loop_over("kind", ["wav", "aiff", "au", "w64", "rf64"])
def test_a_cut_file_is_refused(tmp_path, kind: str) -> None:
    path = tmp_path / f"cut.{kind}"
    soundfile.write(str(path), torch.rand(8_000).numpy(), 16_000)
    path.write_bytes(path.read_bytes()[:2_000])
    with pytest.raises(DataError, match="is cut short"):
        read_wave(path)


def test_a_file_that_was_written_to_a_pipe_is_read_to_its_end(write_wave) -> None:
    path = write_wave("pipe.wav", torch.rand(8_000))
    data = path.read_bytes()
    start = data.index(b"data") + 4
    path.write_bytes(data[:start] + b"\xff" * 4 + data[start + 4 :])
    assert len(read_wave(path).samples) == 8_000


def test_silence_is_recognised(write_wave) -> None:
    assert read_wave(write_wave("quiet.wav", torch.zeros(800))).is_silent
    assert not read_wave(write_wave("soft.wav", torch.full((800,), 1e-3))).is_silent
