"""Tests of saved encoders and of transcribing."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from linformer_cli.errors import CheckpointError
from linformer_cli.speech.encoder import BI_LSTM, EncoderSettings, build_encoder
from linformer_cli.speech.saved import Recogniser, choose_recogniser, load_recogniser, save_recogniser, transcribe
from linformer_cli.speech.waves import BANDS, Wave

TINY = EncoderSettings(layers=1, heads=2, width=8, stack=3, lstm_layers=1, lstm_cells=4)


def make_recogniser(attention: str = "linear", error_rate: float = 0.25) -> Recogniser:
    torch.manual_seed(0)
    options = {"feature_map": "relu"} if attention == "linear" else {}
    encoder = build_encoder(attention, options, TINY, 2).eval()
    return Recogniser("mine", attention, options, encoder, ("a", "b"), 8_000, "tones", ("bob",), error_rate)


@pytest.mark.parametrize("attention", ["linear", BI_LSTM])
def test_a_saved_recogniser_computes_the_same(tmp_path: Path, attention: str) -> None:
    before = make_recogniser(attention)
    save_recogniser(tmp_path / "mine.safetensors", before)
    after = load_recogniser(tmp_path / "mine.safetensors")
    features, lengths = torch.randn(1, 20, BANDS), torch.tensor([20])
    torch.testing.assert_close(after.encoder(features, lengths), before.encoder(features, lengths))
    assert (after.name, after.alphabet, after.rate, after.held_out) == ("mine", ("a", "b"), 8_000, ("bob",))
    assert after.encoder.settings == TINY and after.options == before.options


def test_the_best_or_the_named_recogniser_is_chosen(tmp_path: Path) -> None:
    for attention, rate in (("linear", 0.3), ("softmax", 0.2)):
        save_recogniser(tmp_path / f"{attention}.safetensors", make_recogniser(attention, rate))
    assert choose_recogniser(tmp_path, None).attention == "softmax"
    assert choose_recogniser(tmp_path, "linear").attention == "linear"
    with pytest.raises(CheckpointError, match=r"no trained encoder 'lsh' in .*; run lintx bench speech first"):
        choose_recogniser(tmp_path, "lsh")
    with pytest.raises(CheckpointError, match="no trained encoder in"):
        choose_recogniser(tmp_path / "missing", None)


@pytest.mark.parametrize("damage", ["cut", "other", "no record", "narrower", "more layers", "no layer"])
def test_a_damaged_recogniser_is_refused_in_one_line(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "mine.safetensors"
    save_recogniser(path, make_recogniser())
    data = path.read_bytes()
    damaged = {
        "cut": data[:200],
        "other": data.replace(b"lintx-speech-1", b"lintx-speech-9"),
        "narrower": data.replace(b'\\"width\\": 8', b'\\"width\\": 6'),
        "more layers": data.replace(b'\\"layers\\": 1', b'\\"layers\\": 9'),
        "no layer": data.replace(b'\\"lstm_layers\\": 1', b'\\"lstm_layers\\": 0'),
        "no record": save({"x": torch.zeros(1)}, {"format": "lintx-speech-1", "about": "1"}),
    }
    assert damaged[damage] != data
    path.write_bytes(damaged[damage])
    with pytest.raises(CheckpointError, match="is not a model of lintx bench speech") as found:
        load_recogniser(path)
    assert "\n" not in str(found.value)


def test_symbols_of_a_transcript_are_in_order_and_within_the_recording() -> None:
    samples = torch.randn(8_000, generator=torch.Generator().manual_seed(0))
    found = transcribe(make_recogniser(), Wave(samples, 8_000, 8_000))
    assert found.features.shape == (101, BANDS) and found.symbols
    ends = [0.0, *(one.end_seconds for one in found.symbols)]
    for end, one in zip(ends, found.symbols, strict=False):
        assert end <= one.start_seconds < one.end_seconds <= 1.0 and 0 < one.probability <= 1
        assert one.symbol in ("a", "b")


def test_silence_has_no_symbols() -> None:
    assert transcribe(make_recogniser(), Wave(torch.zeros(8_000), 8_000, 8_000)).symbols == ()
