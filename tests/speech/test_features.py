"""Tests of log-mel features."""

import math

import pytest
import torch

from linformer_cli.speech.waves import BANDS, log_mel, mel_filters, normalise


@pytest.mark.parametrize("rate", [8_000, 16_000])
def test_a_tone_is_loudest_in_the_band_around_it(rate: int) -> None:
    previous = -1
    for hertz in (200, 500, 1_000, 2_000, 3_500):
        samples = torch.sin(2 * math.pi * hertz * torch.arange(rate) / rate)
        features = log_mel(samples, rate)
        assert features.shape == (101, BANDS)
        loudest = features[10:90].argmax(dim=1).unique()
        weights = mel_filters(512 if rate == 8_000 else 1_024, rate)
        bin_of_tone = round(hertz / (rate / 2) * (weights.shape[1] - 1))
        assert loudest.tolist() == [int(weights[:, bin_of_tone].argmax())]
        assert int(loudest) > previous
        previous = int(loudest)


def test_every_band_has_weights_and_neighbours_overlap() -> None:
    for size, rate in ((512, 8_000), (1_024, 16_000), (4_096, 48_000)):
        weights = mel_filters(size, rate)
        assert (weights.sum(dim=1) > 0).all()
        assert ((weights[:-1] * weights[1:]).sum(dim=1) > 0).all()


def test_the_louder_of_two_equal_recordings_has_the_same_normalised_features() -> None:
    samples = torch.randn(8_000, generator=torch.Generator().manual_seed(0))
    soft, loud = (normalise(log_mel(factor * samples, 8_000)) for factor in (0.1, 1.0))
    torch.testing.assert_close(soft, loud, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(soft.mean(dim=0), torch.zeros(BANDS), atol=1e-4, rtol=0)
    torch.testing.assert_close(soft.std(dim=0, correction=0), torch.ones(BANDS))


def test_silence_and_a_single_sample_have_finite_features() -> None:
    for samples in (torch.zeros(800), torch.ones(1)):
        assert normalise(log_mel(samples, 8_000)).isfinite().all()
