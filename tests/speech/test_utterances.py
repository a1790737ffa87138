"""Tests of strings of digits, of utterances and of their batches."""

import dataclasses
from pathlib import Path

import pytest
import torch

from linformer_cli.errors import DataError
from linformer_cli.speech.corpus import LEXICON, Corpus, load_corpus
from linformer_cli.speech.utterances import (
    Fold,
    StringSettings,
    Utterance,
    draw_strings,
    group_by_length,
    make_batches,
    require_room,
)
from linformer_cli.speech.waves import BANDS

SETTINGS = StringSettings(frames=(100, 200))


@pytest.fixture
def corpus(digits: Path) -> Corpus:
    return load_corpus("fsdd", str(digits))


def make_utterance(frames: int, symbols: list[int], name: str = "one.wav") -> Utterance:
    return Utterance(name, "ann", torch.full((frames, BANDS), float(frames)), torch.tensor(symbols))


def test_no_speaker_is_in_training_and_in_validation(corpus: Corpus, tones: Path) -> None:
    for one in (corpus, load_corpus(f"speech:{tones}")):
        fold = Fold(one, 0, (6, 4), 3)
        said = [{each.speaker for each in part} for part in (fold.draw(0), fold.draw())]
        assert said == [set(fold.speakers), set(fold.held_out)] and not said[0] & said[1]


def test_a_string_has_whole_digits_of_one_speaker_and_fits_its_frames(corpus: Corpus) -> None:
    words = {word: "".join(symbols) for word, symbols in LEXICON.items()}
    for one in draw_strings(corpus, ["ann", "bob"], 12, SETTINGS, [0]):
        text = "".join(corpus.alphabet[number - 1] for number in one.symbols.tolist())
        while text:  # no word's phonemes begin with another word's
            word = next(symbols for symbols in words.values() if text.startswith(symbols))
            text = text.removeprefix(word)
        assert one.features.shape == (one.frames, BANDS) and 40 <= one.frames <= 200


def test_strings_depend_only_on_their_seed(corpus: Corpus) -> None:
    first, same, other = (draw_strings(corpus, ["ann"], 3, SETTINGS, seed) for seed in ([0, 1], [0, 1], [0, 2]))
    assert all(torch.equal(one.features, two.features) for one, two in zip(first, same, strict=True))
    assert not torch.equal(first[0].features[:40], other[0].features[:40])
    assert not torch.equal(first[0].features[:40], first[1].features[:40])
    longer = draw_strings(corpus, ["ann"], 5, SETTINGS, [0, 1])
    assert torch.equal(longer[2].features, first[2].features)


def test_speakers_take_turns_and_others_are_left_out(corpus: Corpus) -> None:
    assert [one.speaker for one in draw_strings(corpus, ["bob", "ann"], 3, SETTINGS, [0])] == ["bob", "ann", "bob"]
    assert {one.speaker for one in draw_strings(corpus, ["bob"], 3, SETTINGS, [0])} == {"bob"}


def test_a_faster_string_has_more_symbols_in_the_same_frames(corpus: Corpus) -> None:
    plain = StringSettings(frames=(200, 200))
    fast = dataclasses.replace(plain, speed=(1.2, 1.2))
    sides = [draw_strings(corpus, ["ann"], 8, settings, [0]) for settings in (plain, fast)]
    for side in sides:
        assert 175 < max(one.frames for one in side) <= 200
    rates = [sum(len(one.symbols) for one in side) / sum(one.frames for one in side) for side in sides]
    assert rates[1] > 1.05 * rates[0]


def test_a_string_with_more_symbols_than_positions_is_named() -> None:
    require_room([make_utterance(9, [1, 2, 3])], stack=3)
    require_room([make_utterance(10, [1, 1, 2])], stack=3)  # 4 positions, and one blank is needed
    for frames, symbols in ((6, [1, 2, 3]), (9, [1, 1, 2])):
        with pytest.raises(DataError, match=r"'one.wav' has 3 symbols, which need \d positions of 30 ms, but it has"):
            require_room([make_utterance(frames, symbols)], stack=3)


def test_batches_hold_similar_lengths_and_pad_with_zeros() -> None:
    utterances = [make_utterance(frames, [1] * symbols) for frames, symbols in ((5, 1), (20, 3), (18, 2), (4, 1))]
    groups = group_by_length(utterances, 40)
    assert [[one.frames for one in group] for group in groups] == [[20, 18], [5, 4]]
    (first, second) = make_batches(groups)
    assert first.features.shape == (2, 20, BANDS)
    assert (first.lengths.tolist(), first.counts.tolist()) == ([20, 18], [3, 2])
    assert first.symbols.tolist() == [[1, 1, 1], [1, 1, 0]]
    assert not first.features[1, 18:].any() and first.features[1, :18].all()
    assert second.lengths.tolist() == [5, 4]


def test_the_order_of_batches_depends_on_the_seed() -> None:
    groups = [[make_utterance(frames, [1])] for frames in range(1, 9)]
    orders = [[int(batch.lengths[0]) for batch in make_batches(groups, seed)] for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2] and sorted(orders[2]) == list(range(1, 9))


def test_an_utterance_longer_than_a_batch_is_a_batch() -> None:
    assert [len(group) for group in group_by_length([make_utterance(50, [1]), make_utterance(9, [1])], 20)] == [1, 1]
