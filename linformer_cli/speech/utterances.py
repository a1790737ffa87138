"""Utterances, among them random strings of spoken digits, divided by speakers into training and validation."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from linformer_cli.errors import DataError
from .corpus import Corpus, Recording, split_speakers
from .waves import HOP_SECONDS, log_mel, normalise

SPEED_CHANGE = 0.15  # training strings are up to this much faster or slower, which also changes the pitch
# These parts of the seeds make training and validation strings different.
_TRAINING, _VALIDATION = 1, 2


@dataclass(frozen=True)
class Utterance:
    """Features [T, 40], normalised, and the numbers of the symbols in the alphabet, from 1. 0 is the blank of CTC."""

    name: str
    speaker: str
    features: Tensor
    symbols: Tensor

    @property
    def frames(self) -> int:
        return len(self.features)


@dataclass(frozen=True)
class StringSettings:
    """How recordings of a speaker are joined. Every value is drawn uniformly between its two ends.

    A string ends before it would be longer than its number of frames (10 ms each). Levels of recordings are changed,
    and white noise is added. `speed` changes tempo and pitch (Ko 2015, Interspeech), only in training.
    """

    frames: tuple[int, int] = (100, 800)
    pause_seconds: tuple[float, float] = (0.05, 0.30)
    level_decibels: tuple[float, float] = (-6.0, 6.0)
    noise_decibels: tuple[float, float] = (-60.0, -40.0)
    speed: tuple[float, float] = (1.0, 1.0)


def draw_strings(
    corpus: Corpus, speakers: Sequence[str], count: int, settings: StringSettings, seed: Sequence[int]
) -> list[Utterance]:
    """Draw `count` strings, each of one of `speakers` in turn. They depend only on the arguments."""
    by_speaker = {name: [one for one in corpus.recordings if one.speaker == name] for name in speakers}
    found = []
    for number in range(count):
        speaker = speakers[number % len(speakers)]
        random = np.random.default_rng([*seed, number])
        found.append(_draw_string(corpus, by_speaker[speaker], settings, random, f"string {number + 1} of {speaker}"))
    return found


def take_recordings(corpus: Corpus, speakers: Sequence[str]) -> list[Utterance]:
    return [
        describe(corpus, one.name, one.speaker, one.samples, one.symbols)
        for one in corpus.recordings
        if one.speaker in speakers
    ]


def describe(corpus: Corpus, name: str, speaker: str, samples: Tensor, symbols: Sequence[str]) -> Utterance:
    """Compute the features of samples, and number their symbols."""
    numbers = {symbol: number for number, symbol in enumerate(corpus.alphabet, start=1)}
    features = normalise(log_mel(samples, corpus.rate))
    return Utterance(name, speaker, features, torch.tensor([numbers[symbol] for symbol in symbols]))


def require_room(utterances: Sequence[Utterance], stack: int) -> None:
    """Raise `DataError` for an utterance whose positions are fewer than its symbols and blanks between equal ones."""
    for one in utterances:
        needed = len(one.symbols) + int((one.symbols[1:] == one.symbols[:-1]).sum())
        positions = -(-one.frames // stack)
        if needed > positions:
            raise DataError(
                f"'{one.name}' has {len(one.symbols)} symbols, which need {needed} positions of "
                f"{1000 * HOP_SECONDS * stack:.0f} ms, but it has only {positions}; correct its transcript or leave "
                "it out"
            )


@dataclass(frozen=True)
class Batch:
    """Features [B, T, 40] with zeros after `lengths` [B] frames, and symbols [B, S] after `counts` [B] of them."""

    features: Tensor
    lengths: Tensor
    symbols: Tensor
    counts: Tensor

    def to(self, device: str) -> "Batch":
        return Batch(*(part.to(device) for part in (self.features, self.lengths, self.symbols, self.counts)))


def group_by_length(utterances: Sequence[Utterance], frames: int) -> list[list[Utterance]]:
    """Return groups of similar length, longest first, of at most `frames` frames with padding, or of one utterance."""
    groups: list[list[Utterance]] = []
    for one in sorted(utterances, key=lambda one: one.frames, reverse=True):
        if groups and groups[-1][0].frames * (len(groups[-1]) + 1) <= frames:
            groups[-1].append(one)
        else:
            groups.append([one])
    return groups


def make_batches(groups: Sequence[Sequence[Utterance]], seed: int | None = None) -> Iterator[Batch]:
    """Yield a batch for each group, in an order drawn from `seed` (None: as given)."""
    order = torch.arange(len(groups))
    if seed is not None:
        order = torch.randperm(len(groups), generator=torch.Generator().manual_seed(seed))
    for place in order.tolist():
        group = groups[place]
        yield Batch(
            pad_sequence([one.features for one in group], batch_first=True),
            torch.tensor([one.frames for one in group]),
            pad_sequence([one.symbols for one in group], batch_first=True),
            torch.tensor([len(one.symbols) for one in group]),
        )


class Fold:
    """The speakers of one seed, and batches of at most `frames` frames. A position has `stack` frames.

    If words are joined, `strings` are the numbers of strings for training, new in every epoch, and validation, always
    the same. Raises what `require_room` raises.
    """

    def __init__(
        self, corpus: Corpus, seed: int, strings: tuple[int, int], stack: int, frames: int = 1_200, device: str = "cpu"
    ) -> None:
        self.corpus, self.seed = corpus, seed
        self.speakers, self.held_out = split_speakers(corpus.speakers, seed)
        self._strings, self._stack, self._frames, self._device = strings, stack, frames, device
        self.validation = self.draw_batches()

    def draw(self, epoch: int | None = None) -> list[Utterance]:
        """Return the utterances of an epoch, counted from 0, or without one those of the speakers that are held out."""
        speakers = self.held_out if epoch is None else self.speakers
        if not self.corpus.joined:
            found = take_recordings(self.corpus, speakers)
        elif epoch is None:
            found = draw_strings(self.corpus, speakers, self._strings[1], StringSettings(), [_VALIDATION])
        else:
            changed = StringSettings(speed=(1 - SPEED_CHANGE, 1 + SPEED_CHANGE))
            found = draw_strings(self.corpus, speakers, self._strings[0], changed, [_TRAINING, self.seed, epoch])
        require_room(found, self._stack)
        return found

    def draw_batches(self, epoch: int | None = None) -> list[Batch]:
        """Return the batches of what `draw` returns. The order of an epoch depends on seed and epoch."""
        frames, seed = (4 * self._frames, None) if epoch is None else (self._frames, self.seed * 1_000_003 + epoch)
        return [batch.to(self._device) for batch in make_batches(group_by_length(self.draw(epoch), frames), seed)]


def _draw_string(
    corpus: Corpus, recordings: Sequence[Recording], settings: StringSettings, random: np.random.Generator, name: str
) -> Utterance:
    hop = HOP_SECONDS * corpus.rate
    speed = random.uniform(*settings.speed)
    room = random.uniform(*settings.frames) * hop * speed
    parts: list[Tensor] = [_pause(corpus.rate, settings, random)]
    symbols: list[str] = []
    length = len(parts[0])
    while True:
        recording = recordings[int(random.integers(len(recordings)))]
        pause = _pause(corpus.rate, settings, random)
        gain = 10 ** (random.uniform(*settings.level_decibels) / 20)
        length += len(recording.samples) + len(pause)
        if symbols and length > room:
            break
        parts += [recording.samples * gain, pause]
        symbols += recording.symbols
    samples = torch.cat(parts)
    if speed != 1:
        places = np.arange(0, len(samples) - 1, speed)
        samples = torch.from_numpy(np.interp(places, np.arange(len(samples)), samples.numpy())).float()
    level = float(samples.square().mean().sqrt()) * 10 ** (random.uniform(*settings.noise_decibels) / 20)
    samples = samples + torch.from_numpy(random.standard_normal(len(samples), dtype=np.float32)) * level
    return describe(corpus, name, recording.speaker, samples, symbols)


def _pause(rate: int, settings: StringSettings, random: np.random.Generator) -> Tensor:
    return torch.zeros(round(random.uniform(*settings.pause_seconds) * rate))
