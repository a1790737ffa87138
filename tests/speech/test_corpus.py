"""Tests of the two kinds of speech data and of the folds by speaker."""

import math
from pathlib import Path

import pytest
import torch

from linformer_cli.errors import DataError, UsageError
from linformer_cli.speech.corpus import load_corpus, split_speakers


def test_the_digits_have_their_speakers_and_phonemes(digits: Path) -> None:
    corpus = load_corpus("fsdd", str(digits))
    assert (corpus.rate, len(corpus.recordings), corpus.speakers, corpus.joined) == (8_000, 20, ("ann", "bob"), True)
    said = {one.name: one.symbols for one in corpus.recordings}
    assert said["6_bob_0.wav"] == ("S", "IH", "K", "S")
    assert len(corpus.alphabet) == 19
    assert "not WSJ" in corpus.title and corpus.notes == ()


def test_a_folder_of_ones_own_is_read_as_it_is(tones: Path) -> None:
    corpus = load_corpus(f"speech:{tones}")
    assert [one.name for one in corpus.recordings][:2] == ["ann-0.wav", "ann-1.wav"]
    assert corpus.recordings[1].symbols == ("b", "c", "a")
    assert (corpus.alphabet, corpus.speakers, corpus.joined) == (("a", "b", "c"), ("ann", "bob"), False)


def test_recordings_at_another_rate_are_resampled_and_counted(tones: Path, write_wave) -> None:
    write_wave("tones/ann-0.wav", torch.rand(4_800), 16_000)
    corpus = load_corpus(f"speech:{tones}")
    assert len(corpus.recordings[0].samples) == 2_400
    assert corpus.notes == ("1 of 12 recordings resampled to 8,000 Hz from 16,000 Hz",)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("ann-0.wav\tann\t \n", "line 2: the transcript is empty"),
        ("ann-0.wav\t\ta\n", "line 2: the speaker is empty"),
        ("ann-0.wav ann a\n", "line 2: needs file, speaker and symbols separated by tabs, found 1 parts"),
        ("no.wav\tann\ta\n", "no.wav' does not exist"),
        ("transcripts.tsv\tann\ta\n", "cannot read '.*transcripts.tsv' as sound"),
        ("ann-0.wav\tann\ta\n", "has 1 speakers; validation needs speakers that training leaves out"),
        ("", "has 0 speakers"),
    ],
)
def test_an_unusable_transcript_is_refused_in_one_line(tones: Path, line: str, message: str) -> None:
    (tones / "transcripts.tsv").write_text("file\tspeaker\tsymbols\n" + line)
    with pytest.raises(DataError, match=message) as found:
        load_corpus(f"speech:{tones}")
    assert "\n" not in str(found.value)


def test_transcripts_that_are_not_text_are_refused(tones: Path) -> None:
    (tones / "transcripts.tsv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="not a table in UTF-8"):
        load_corpus(f"speech:{tones}")


def test_a_silent_recording_is_named(tones: Path, write_wave) -> None:
    write_wave("tones/bob-3.wav", torch.zeros(800))
    with pytest.raises(DataError, match=r"bob-3\.wav' is silent"):
        load_corpus(f"speech:{tones}")


def test_missing_data_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no spoken digits in .*unpack"):
        load_corpus("fsdd", str(tmp_path))
    with pytest.raises(DataError, match=r"transcripts\.tsv' \(no such file or directory\); write a line per recording"):
        load_corpus(f"speech:{tmp_path}")
    with pytest.raises(UsageError, match="unknown speech data 'wsj'; use fsdd or speech:DIR"):
        load_corpus("wsj")


@pytest.mark.parametrize(("speakers", "each"), [("abcdef", 2), ("abc", 1), ("ab", 1)])
def test_every_speaker_is_held_out_once(speakers: str, each: int) -> None:
    held_out: list[str] = []
    for seed in range(math.ceil(len(speakers) / each)):
        training, validation = split_speakers(list(speakers), seed)
        assert sorted(training + validation) == list(speakers) and len(validation) == each
        held_out += validation
    assert sorted(held_out) == list(speakers)
