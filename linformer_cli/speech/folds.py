"""The training and validation utterances of a seed, which have different speakers."""

from dataclasses import replace

from .corpus import Corpus, split_speakers
from .utterances import StringSettings, Utterance, draw_strings, require_room, take_recordings

# Training strings are up to this much faster or slower, which also changes the pitch.
SPEED_CHANGE = 0.15
# These parts of the seeds make training and validation strings different.
_TRAINING, _VALIDATION = 1, 2


class Fold:
    """The speakers of one seed. If words are joined, `strings` are the numbers of strings for training and validation.

    Every epoch has new strings. The validation strings of a fold are always the same.
    """

    def __init__(self, corpus: Corpus, seed: int, strings: tuple[int, int]) -> None:
        self.corpus, self.seed, self.strings = corpus, seed, strings
        self.speakers, self.held_out = split_speakers(corpus.speakers, seed)
        self._settings = StringSettings()

    def draw_training(self, epoch: int, stack: int) -> list[Utterance]:
        """Return the utterances of an epoch, counted from 0. Raises what `require_room` raises."""
        if self.corpus.joined:
            changed = replace(self._settings, speed=(1 - SPEED_CHANGE, 1 + SPEED_CHANGE))
            seed = [_TRAINING, self.seed, epoch]
            found = draw_strings(self.corpus, self.speakers, self.strings[0], changed, seed)
        else:
            found = take_recordings(self.corpus, self.speakers)
        require_room(found, stack)
        return found

    def draw_validation(self, stack: int) -> list[Utterance]:
        """Return the utterances of the speakers that are held out. Raises what `require_room` raises."""
        if self.corpus.joined:
            found = draw_strings(self.corpus, self.held_out, self.strings[1], self._settings, [_VALIDATION])
        else:
            found = take_recordings(self.corpus, self.held_out)
        require_room(found, stack)
        return found
