"""Reads symbols from the log-probabilities of CTC, greedily or with a beam of prefixes, and counts the errors."""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from linformer_cli.system.environment import import_extra
from .encoder import BLANK

# In the beam, a symbol is tried at a position only if its probability there is at least this.
_LEAST_LOG_PROBABILITY = math.log(1e-4)


class Placed(NamedTuple):
    """A symbol's number, the first position at which it is the likeliest, and the position after the last."""

    symbol: int
    start: int
    end: int


def decode_greedily(log_probabilities: Tensor) -> list[Placed]:
    """Take the likeliest symbol of every position [P, symbols + 1]; join equal neighbours and drop blanks."""
    runs: list[Placed] = []
    for position, symbol in enumerate(log_probabilities.argmax(dim=-1).tolist()):
        if runs and runs[-1].symbol == symbol:
            runs[-1] = runs[-1]._replace(end=position + 1)
        else:
            runs.append(Placed(symbol, position, position + 1))
    return [run for run in runs if run.symbol != BLANK]


def decode_by_beam(log_probabilities: Tensor, width: int = 8) -> list[int]:
    """Return the likeliest symbols, by prefix beam search with `width` prefixes (Hannun 2014, arXiv 1408.2873).

    Each prefix sums the probabilities of its alignments, separately for those that end in a blank and those that end
    in its last symbol. There is no language model. Symbols less likely than 1e-4 at a position are not tried there.
    """
    # The pair of a prefix: the log-probabilities of its alignments that end in a blank, and of the others.
    beam: dict[tuple[int, ...], tuple[float, float]] = {(): (0.0, -math.inf)}
    for row in log_probabilities.tolist():
        tried = [symbol for symbol, value in enumerate(row) if value > _LEAST_LOG_PROBABILITY and symbol != BLANK]
        blanks: defaultdict[tuple[int, ...], float] = defaultdict(lambda: -math.inf)
        others: defaultdict[tuple[int, ...], float] = defaultdict(lambda: -math.inf)
        for prefix, (blank, other) in beam.items():
            both = _add(blank, other)
            blanks[prefix] = _add(blanks[prefix], both + row[BLANK])
            if prefix:  # the last symbol goes on
                others[prefix] = _add(others[prefix], other + row[prefix[-1]])
            for symbol in tried:
                # A symbol that follows itself begins anew only after a blank.
                before = blank if prefix and prefix[-1] == symbol else both
                longer = (*prefix, symbol)
                others[longer] = _add(others[longer], before + row[symbol])
        found = {prefix: (blanks[prefix], others[prefix]) for prefix in {**blanks, **others}}
        best = sorted(found, key=lambda prefix: _add(*found[prefix]), reverse=True)[:width]
        beam = {prefix: found[prefix] for prefix in best}
    likeliest = max(beam, key=lambda prefix: _add(*beam[prefix]))
    return list(likeliest)


def _add(a: float, b: float) -> float:
    """Return log(exp(a) + exp(b))."""
    if a < b:
        a, b = b, a
    return a if b == -math.inf else a + math.log1p(math.exp(b - a))


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
