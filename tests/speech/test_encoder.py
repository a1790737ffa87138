"""Tests of the encoders and their training."""

import dataclasses

import pytest
import torch
from loops import first_fast

from linformer_cli.errors import UsageError
from linformer_cli.speech import ctc_task
from linformer_cli.speech.ctc_task import CtcSettings, CtcTask, measure_errors, recognise
from linformer_cli.speech.encoder import BI_LSTM, PRESETS, EncoderSettings, build_encoder
from linformer_cli.speech.utterances import Batch
from linformer_cli.speech.waves import BANDS
from linformer_cli.training.learner import Learner

TINY = EncoderSettings(layers=2, heads=2, width=16, stack=3, lstm_layers=2, lstm_cells=32, dropout=0.0)
ATTENTIONS = ("softmax", "linear", "gau", BI_LSTM)


def draw_features(batch: int, frames: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(batch, frames, BANDS, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_the_padding_of_a_batch_changes_nothing(attention: str) -> None:
    torch.manual_seed(0)
    encoder = build_encoder(attention, {}, TINY, 4).eval()
    features = draw_features(3, 31)
    lengths = torch.tensor([31, 20, 1])
    for row, length in enumerate(lengths):
        features[row, length:] = 0
    together, positions = encoder(features, lengths)
    assert together.shape == (3, 11, 5) and positions.tolist() == [11, 7, 1]
    torch.testing.assert_close(together.exp().sum(dim=-1), torch.ones(3, 11))
    for row, length in enumerate(lengths.tolist()):
        alone, count = encoder(features[row : row + 1, :length], lengths[row : row + 1])
        torch.testing.assert_close(alone[0], together[row, : int(count)], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_every_position_sees_the_whole_utterance(attention: str) -> None:
    torch.manual_seed(0)
    encoder = build_encoder(attention, {}, TINY, 4).eval()
    features = draw_features(1, 30)
    for changed in (0, 29):
        other = features.clone()
        other[0, changed] += 1
        before, after = (encoder(one, torch.tensor([30]))[0] for one in (features, other))
        assert ((before - after).abs().amax(dim=-1) > 0).all()


def test_the_paper_preset_has_the_papers_sizes() -> None:
    paper = PRESETS["paper"]
    assert (paper.layers, paper.heads, paper.width // paper.heads, paper.stack) == (9, 6, 32, 1)
    assert (paper.lstm_layers, paper.lstm_cells) == (3, 320)
    small = PRESETS["small"]
    built = (build_encoder(name, {}, small, 19) for name in ("linear", BI_LSTM))
    attention, lstm = (sum(weight.numel() for weight in encoder.parameters()) for encoder in built)
    assert 0.8 < attention / lstm < 1.25


def test_a_mechanism_without_a_bidirectional_form_is_refused() -> None:
    with pytest.raises(UsageError, match="'rfa' with these options has no bidirectional form"):
        build_encoder("rfa", {"gate": True}, TINY, 4)


def make_batch() -> Batch:
    return Batch(
        draw_features(2, 30), torch.tensor([30, 24]), torch.tensor([[1, 2, 3], [4, 1, 0]]), torch.tensor([3, 2])
    )


@pytest.mark.parametrize("attention", first_fast(["linear", BI_LSTM]))
def test_training_learns_a_batch_by_heart(attention: str) -> None:
    torch.manual_seed(0)
    encoder = build_encoder(attention, {}, TINY, 4)
    task = CtcTask(encoder, CtcSettings(learning_rate=2e-2), seed=0)
    learner, before = Learner(task), measure_errors(encoder, [make_batch()]).rate
    task.begin_epoch([make_batch()], progress=lambda share: 0.3)
    for _ in range(100):
        learner.train_step()
    assert before > 0 and measure_errors(encoder, [make_batch()]).rate == 0
    assert measure_errors(encoder, [make_batch()], beam=4).rate == 0


def test_the_learning_rate_rises_and_falls_to_0(record_rates) -> None:
    settings = CtcSettings(learning_rate=1.0, warm_up_updates=10)
    task = CtcTask(build_encoder("linear", {}, TINY, 4), settings, seed=0)

    def rate_at(step: int, done: float) -> float:
        task.begin_epoch([make_batch()], step, lambda share: done)
        return task.learning_rate_at(step, 0.0)

    assert [rate_at(step, 0.0) for step in (0, 4, 9, 50)] == [0.1, 0.5, 1.0, 1.0]
    assert rate_at(50, 0.5) == pytest.approx(0.5)
    assert rate_at(50, 1.0) == rate_at(50, 1.5) == 0
    learner = Learner(task)
    task.begin_epoch([make_batch()] * 4, progress=lambda share: share)
    rates = record_rates(lambda: [learner.train_step() for _ in range(4)])
    assert rates == [rate_at(step, step / 4) for step in range(4)]


def test_errors_are_counted_without_dropout() -> None:
    torch.manual_seed(0)
    encoder = build_encoder("linear", {}, dataclasses.replace(TINY, dropout=0.5), 4).train()
    once, again = recognise(encoder, make_batch()), recognise(encoder, make_batch())
    assert all(torch.equal(*pair) for pair in zip(once, again, strict=True))


def test_errors_are_counted_greedily_or_with_a_beam(monkeypatch) -> None:
    """In both positions, the blank is more likely than symbol 1, but only one of four pairs gives no symbol."""
    encoder = build_encoder("linear", {}, TINY, 1)
    monkeypatch.setattr(ctc_task, "recognise", lambda encoder, batch: [torch.tensor([[0.6, 0.4], [0.6, 0.4]]).log()])
    batch = Batch(draw_features(1, 6), torch.tensor([6]), torch.tensor([[1]]), torch.tensor([1]))
    assert measure_errors(encoder, [batch]).rate == 1
    assert measure_errors(encoder, [batch], beam=4).rate == 0
