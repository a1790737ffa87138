"""Trains an encoder with CTC, one epoch after another; reads symbols from its predictions, and counts the errors."""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from linformer_cli.config import LARGEST_STEP, TrainConfig
from linformer_cli.system.environment import import_extra
from linformer_cli.training.task import Task
from .encoder import BLANK, Encoder, ctc_loss
from .utterances import Batch

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
    """Return the likeliest symbols, by prefix beam search (Hannun 2014, arXiv 1408.2873) without a language model."""
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
    found = jiwer.process_words(*([" ".join(map(str, symbols)) for symbols in side] for side in (true, decoded)))
    symbols = found.hits + found.substitutions + found.deletions
    return Errors(symbols, found.substitutions, found.deletions, found.insertions)


@dataclass(frozen=True)
class CtcSettings:
    """RAdam with a linear warm-up, cosine decay to 0 over the whole training, and gradient clipping."""

    learning_rate: float = 4e-3
    warm_up_updates: int = 100
    weight_decay: float = 0.01
    clip: float = 1.0


class CtcTask(Task[Encoder, Batch]):
    """The training of an encoder on the batches of the newest epoch, which are repeated if there are too few."""

    def __init__(self, encoder: Encoder, settings: CtcSettings, seed: int, device: str = "cpu") -> None:
        rate, decay = settings.learning_rate, settings.weight_decay
        optimizer = torch.optim.RAdam(encoder.parameters(), rate, weight_decay=decay, decoupled_weight_decay=True)
        config = TrainConfig(
            steps=LARGEST_STEP,
            batch=1,
            learning_rate=rate,
            final_learning_rate_fraction=0,
            warmup_steps=settings.warm_up_updates - 1,
            clip=settings.clip,
            seed=seed,
        )
        super().__init__(encoder, optimizer, config, device)

    def begin_epoch(
        self, batches: Sequence[Batch], first_step: int = 0, progress: Callable[[float], float] = lambda share: 0.0
    ) -> None:
        """Train on `batches` from `first_step` on; `progress` maps a share of this epoch to that of the training."""
        self._batches, self._first, self._progress = batches, first_step, progress
        self.model.train()

    def load_batch(self, number: int, rows: range) -> Batch:
        return self._batches[(number - self._first) % len(self._batches)]

    def measure_loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        log_probabilities, positions = self.model(batch.features, batch.lengths)
        loss = ctc_loss(log_probabilities, positions, batch.symbols, batch.counts)
        return loss, loss

    def learning_rate_at(self, step: int, share: float) -> float:
        return super().learning_rate_at(step, min(1.0, self._progress((step - self._first) / len(self._batches))))


def measure_errors(encoder: Encoder, batches: Sequence[Batch], beam: int | None = None) -> Errors:
    """Decode all batches, greedily or with a beam of this width, and count the errors."""
    true: list[list[int]] = []
    decoded: list[list[int]] = []
    for batch in batches:
        for row, symbols, count in zip(recognise(encoder, batch), batch.symbols, batch.counts, strict=True):
            true.append(symbols[:count].tolist())
            decoded.append(decode_by_beam(row, beam) if beam else [one.symbol for one in decode_greedily(row)])
    return count_errors(true, decoded)


@torch.no_grad()
def recognise(encoder: Encoder, batch: Batch) -> list[Tensor]:
    """Return the log-probabilities [P, symbols + 1] of each utterance, without padding."""
    encoder.eval()
    found, positions = encoder(batch.features, batch.lengths)
    return [row[:count].cpu() for row, count in zip(found, positions.tolist(), strict=True)]
