"""The phoneme error rate."""

from collections.abc import Sequence
from dataclasses import dataclass

from linformer_cli.system.environment import import_extra


@dataclass(frozen=True)
class Errors:
    """The edits that turn the true symbols of all utterances into the decoded ones."""

    symbols: int
    substitutions: int
    deletions: int
    insertions: int

    @property
    def rate(self) -> float:
        """All edits per true symbol. It exceeds 1 if there are many insertions."""
        return (self.substitutions + self.deletions + self.insertions) / self.symbols


def count_errors(true: Sequence[Sequence[int]], decoded: Sequence[Sequence[int]]) -> Errors:
    """Count the fewest edits with jiwer, over all utterances. None of `true` may be empty."""
    jiwer = import_extra("jiwer", "speech")
    texts = ([" ".join(map(str, symbols)) for symbols in side] for side in (true, decoded))
    found = jiwer.process_words(*texts)
    return Errors(
        found.hits + found.substitutions + found.deletions, found.substitutions, found.deletions, found.insertions
    )
