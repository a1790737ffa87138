"""Trains an encoder with CTC, one epoch after another, and counts its errors."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from linformer_cli.config import LARGEST_STEP, TrainConfig
from linformer_cli.training.task import Task
from .decoding import Errors, count_errors, decode_by_beam, decode_greedily
from .encoder import Encoder, ctc_loss
from .utterances import Batch


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
        """Train on `batches` from step `first_step` on.

        `progress` returns the share of the whole training that is done when a share of this epoch is done.
        """
        self._batches, self._first, self._progress = batches, first_step, progress
        self.model.train()

    def load_batch(self, number: int, rows: range) -> Batch:
        return self._batches[(number - self._first) % len(self._batches)]

    def measure_loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the mean loss in nats per symbol, twice."""
        log_probabilities, positions = self.model(batch.features, batch.lengths)
        loss = ctc_loss(log_probabilities, positions, batch.symbols, batch.counts)
        return loss, loss

    def learning_rate_at(self, step: int, share: float) -> float:
        done = self._progress((step - self._first) / len(self._batches))
        return super().learning_rate_at(step, min(1.0, done))


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
