"""Recordings with their speakers and symbols: the spoken digits, or a folder of your own."""

import collections
import csv
import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from linformer_cli.data.images import find_data_dir
from linformer_cli.errors import DataError, UsageError
from .waves import Wave, read_rate, read_wave

DIGITS_NAME = "fsdd"
FOLDER_PREFIX = "speech:"
TRANSCRIPTS = "transcripts.tsv"
_DIGITS_TITLE = "Free Spoken Digit Dataset, digits joined to strings; not WSJ"
_DIGITS_FILE = re.compile(r"(\d)_([^_]+)_\d+\.wav")
_HEADER = ["file", "speaker", "symbols"]
_FEWEST_SPEAKERS = 2  # testing on speakers that the model has never heard needs at least two speakers

# First pronunciations of the CMU Pronouncing Dictionary (github.com/cmusphinx/cmudict), without stress.
LEXICON: dict[str, tuple[str, ...]] = {
    "zero": ("Z", "IH", "R", "OW"),
    "one": ("W", "AH", "N"),
    "two": ("T", "UW"),
    "three": ("TH", "R", "IY"),
    "four": ("F", "AO", "R"),
    "five": ("F", "AY", "V"),
    "six": ("S", "IH", "K", "S"),
    "seven": ("S", "EH", "V", "AH", "N"),
    "eight": ("EY", "T"),
    "nine": ("N", "AY", "N"),
}
DIGITS = tuple(LEXICON)


@dataclass(frozen=True)
class Recording:
    """Samples float32 [N] of one speaker, and what is said. `name` is for messages."""

    name: str
    speaker: str
    symbols: tuple[str, ...]
    samples: Tensor


@dataclass(frozen=True)
class Corpus:
    """Recordings at `rate` samples per second. If `joined`, they are words to be joined to strings."""

    title: str
    rate: int
    recordings: tuple[Recording, ...]
    joined: bool
    notes: tuple[str, ...] = ()

    @functools.cached_property
    def alphabet(self) -> tuple[str, ...]:
        return tuple(sorted({symbol for one in self.recordings for symbol in one.symbols}))

    @functools.cached_property
    def speakers(self) -> tuple[str, ...]:
        return tuple(sorted({one.speaker for one in self.recordings}))


def load_corpus(name: str, data_dir: str | None = None) -> Corpus:
    """Load `fsdd` or `speech:DIR`, or raise `UsageError`; `DataError` names the first file that cannot be used."""
    if name == DIGITS_NAME:
        return _load_digits(data_dir)
    if name.startswith(FOLDER_PREFIX):
        return _load_folder(Path(name.removeprefix(FOLDER_PREFIX)).expanduser())
    raise UsageError(f"unknown speech data '{name}'; use {DIGITS_NAME} or {FOLDER_PREFIX}DIR")


def split_speakers(speakers: Sequence[str], seed: int) -> tuple[list[str], list[str]]:
    """Return speakers for training, and one of three (or two) held out, so that three seeds hold out each once."""
    folds = min(3, len(speakers))
    held_out = list(speakers[seed % folds :: folds])
    return [speaker for speaker in speakers if speaker not in held_out], held_out


def _load_digits(data_dir: str | None) -> Corpus:
    root, origin = find_data_dir(data_dir)
    folder = next((root / part for part in ("fsdd/recordings", "recordings") if (root / part).is_dir()), None)
    files = sorted(folder.iterdir()) if folder is not None else []
    named = [(file, found) for file in files if (found := _DIGITS_FILE.fullmatch(file.name))]
    if not named:
        unpack = "unpack github.com/Jakobovski/free-spoken-digit-dataset to fsdd/ there"
        others = "name another folder with --data-dir, or use --data speech:DIR"
        raise DataError(f"no spoken digits in {root} ({origin}): {unpack}, {others}")
    waves, rate, notes = _read_waves([file for file, _ in named])
    recordings = [
        Recording(file.name, found[2], LEXICON[DIGITS[int(found[1])]], wave.samples)
        for (file, found), wave in zip(named, waves, strict=True)
    ]
    return _check(Corpus(_DIGITS_TITLE, rate, tuple(recordings), True, notes), folder or root)


def _load_folder(folder: Path) -> Corpus:
    lines = _read_transcripts(folder / TRANSCRIPTS)
    waves, rate, notes = _read_waves([folder / file for file, _, _ in lines])
    recordings = [Recording(*line, wave.samples) for line, wave in zip(lines, waves, strict=True)]
    return _check(Corpus(f"{folder.resolve().name}; not WSJ", rate, tuple(recordings), False, notes), folder)


def _read_transcripts(path: Path) -> list[tuple[str, str, tuple[str, ...]]]:
    try:
        with open(path, newline="", encoding="utf-8-sig") as opened:
            rows = list(csv.reader(opened, delimiter="\t", quoting=csv.QUOTE_NONE))
    except OSError as error:
        hint = "write a line per recording: file, speaker, symbols, separated by tabs"
        raise DataError(f"cannot read '{path}' ({(error.strerror or str(error)).lower()}); {hint}") from None
    except (ValueError, csv.Error) as error:
        raise DataError(f"'{path}' is not a table in UTF-8 ({error}); save it as text") from None
    found = []
    for number, row in enumerate(rows, start=1):
        if not row or (number == 1 and [cell.strip().lower() for cell in row] == _HEADER):
            continue
        if len(row) != len(_HEADER):
            why = f"needs file, speaker and symbols separated by tabs, found {len(row)} parts"
            raise DataError(f"'{path}', line {number}: {why}")
        file, speaker, symbols = row[0].strip(), row[1].strip(), tuple(row[2].split())
        if not file or not speaker or not symbols:
            missing = "file" if not file else "speaker" if not speaker else "transcript"
            raise DataError(f"'{path}', line {number}: the {missing} is empty; fill it in or delete the line")
        found.append((file, speaker, symbols))
    return found


def _read_waves(files: Sequence[Path]) -> tuple[list[Wave], int, tuple[str, ...]]:
    """Read all files at their most common rate. Return the waves, the rate, and a note about resampled files."""
    rates = collections.Counter(map(read_rate, files))
    rate = rates.most_common(1)[0][0] if rates else 0
    waves = [read_wave(file, rate) for file in files]
    for file, wave in zip(files, waves, strict=True):
        if wave.is_silent:
            raise DataError(f"'{file}' is silent; record it again or leave it out")
    others = sorted(set(rates) - {rate})
    if not others:
        return waves, rate, ()
    count = sum(rates[other] for other in others)
    listed = ", ".join(f"{other:,}" for other in others)
    return waves, rate, (f"{count:,} of {len(files):,} recordings resampled to {rate:,} Hz from {listed} Hz",)


def _check(corpus: Corpus, folder: Path) -> Corpus:
    if len(corpus.speakers) < _FEWEST_SPEAKERS:
        hint = f"validation needs speakers that training leaves out, so give recordings of at least {_FEWEST_SPEAKERS}"
        raise DataError(f"'{folder}' has {len(corpus.speakers)} speakers; {hint}")
    return corpus
