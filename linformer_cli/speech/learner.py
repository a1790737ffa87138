"""Trains an encoder, one epoch after another."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from linformer_cli.attention.base import Attention
from linformer_cli.errors import TrainingError

from .batches import Batch
from .decoding import decode_by_beam, decode_greedily
from .encoder import Encoder, ctc_loss
from .scoring import Errors, count_errors


@dataclass(frozen=True)
class TrainingSettings:
    """RAdam with a linear warm-up, cosine decay to 0 over the whole training, and gradient clipping."""

    learning_rate: float = 4e-3
    warm_up_updates: int = 100
    weight_decay: float = 0.01
    clip: float = 1.0


def learning_rate_at(settings: TrainingSettings, update: int, progress: float) -> float:
    """Return the learning rate of `update`, counted from 0, when the fraction `progress` of the training is done."""
    warm = min(1.0, (update + 1) / settings.warm_up_updates)
    return settings.learning_rate * warm * (1 + math.cos(math.pi * min(1.0, progress))) / 2


class Learner:
    """An encoder and its optimizer. `learning_rate` is that of the newest update in `train`."""

    def __init__(self, encoder: Encoder, settings: TrainingSettings, seed: int) -> None:
        self.encoder, self._settings, self._seed = encoder, settings, seed
        self._optimizer = torch.optim.RAdam(
            encoder.parameters(),
            settings.learning_rate,
            weight_decay=settings.weight_decay,
            decoupled_weight_decay=True,
        )
        self._step, self.learning_rate = 0, settings.learning_rate

    def train(self, batches: Iterable[Batch], progress: Callable[[], float]) -> float:
        """Update the weights with each batch. Returns the mean loss in nats per symbol.

        `progress` is called before every update and returns the fraction of the training that is done. Raises
        `TrainingError` if the loss is NaN or infinite.
        """
        self.encoder.train()
        losses = []
        for batch in batches:
            self.learning_rate = learning_rate_at(self._settings, self._step, progress())
            for group in self._optimizer.param_groups:
                group["lr"] = self.learning_rate
            losses.append(self.update(batch))
        return sum(losses) / max(1, len(losses))

    def update(self, batch: Batch) -> float:
        """Take one training step. Returns the loss before it."""
        for module in self.encoder.modules():
            if isinstance(module, Attention):
                module.on_training_step(self._step, self._seed)
        self._step += 1
        log_probabilities, positions = self.encoder(batch.features, batch.lengths)
        loss = ctc_loss(log_probabilities, positions, batch.symbols, batch.counts)
        value = float(loss.detach())
        if not math.isfinite(value):
            raise TrainingError(f"the loss was NaN or infinite at update {self._step}")
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.encoder.parameters(), self._settings.clip)
        self._optimizer.step()
        return value

    def measure_errors(self, batches: Sequence[Batch], beam: int | None = None) -> Errors:
        """Decode all batches, greedily or with a beam of this width, and count the errors."""
        true: list[list[int]] = []
        decoded: list[list[int]] = []
        for batch in batches:
            for row, symbols, count in zip(self.recognise(batch), batch.symbols, batch.counts, strict=True):
                true.append(symbols[:count].tolist())
                decoded.append(decode_by_beam(row, beam) if beam else [one.symbol for one in decode_greedily(row)])
        return count_errors(true, decoded)

    @torch.no_grad()
    def recognise(self, batch: Batch) -> list[Tensor]:
        """Return the log-probabilities [P, symbols + 1] of each utterance, without padding."""
        self.encoder.eval()
        found, positions = self.encoder(batch.features, batch.lengths)
        return [row[:count].cpu() for row, count in zip(found, positions.tolist(), strict=True)]
